package plugin

import (
	"archive/zip"
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// hostile is a wheel that must be refused, whose digest is right all the same.
type hostile struct {
	name    string
	data    []byte
	mention string
}

// hostileWheels are also the seeds of FuzzUnpack.
func hostileWheels() []hostile {
	with := func(name string, more ...entry) hostile {
		return hostile{name: name, data: zipped(append(good(), more...)...),
			mention: strings.Trim(strconv.Quote(more[0].name), `"`)}
	}
	whole := zipped(good()...)
	lie := func(size uint64) func(*zip.FileHeader) {
		return func(h *zip.FileHeader) { h.UncompressedSize64 = size }
	}
	return []hostile{
		{"truncated wheel", whole[:len(whole)/2], wheelName},
		{"no archive", []byte("<html>sign in first</html>"), wheelName},
		{"empty file", nil, wheelName},
		with("zip-slip", entry{name: "../../escaped", text: "x"}),
		with("zip-slip inside", entry{name: "alpha/../../escaped", text: "x"}),
		with("absolute path", entry{name: "/tmp/escaped", text: "x"}),
		with("backslash", entry{name: `..\escaped`, text: "x"}),
		with("control character", entry{name: "alpha/a\x00b", text: "x"}),
		with("dot", entry{name: "./alpha/x", text: "x"}),
		with("long name", entry{name: strings.Repeat("n", maxComponent+1), text: "x"}),
		with("long path", entry{name: strings.Repeat("n/", maxName/2) + "x", text: "x"}),
		with("symlink", entry{name: "alpha/bin/link", text: "/etc", mode: fs.ModeSymlink}),
		with("device", entry{name: "alpha/bin/null", mode: fs.ModeDevice}),
		with("file and folder", entry{name: "alpha/alpha.so/x", text: "x"}),
		with("duplicate", entry{name: "alpha/alpha.so", text: "x"}),
		with("duplicate in another case", entry{name: "ALPHA/Alpha.so", text: "x"}),
		with("duplicate by folding", entry{name: "alpha/bin/\u017f", text: "x"},
			entry{name: "alpha/bin/s", text: "x"}),
		with("bomb", entry{name: "alpha/bin/bomb", text: strings.Repeat("\x00", 1<<20)}),
		with("bomb in the header", entry{name: "alpha/bin/bomb", text: "x", raw: lie(1 << 62)}),
		with("larger than declared", entry{name: "alpha/bin/a", text: "four", raw: lie(3)}),
		with("smaller than declared", entry{name: "alpha/bin/a", text: "four", raw: lie(5)}),
		with("wrong checksum", entry{name: "alpha/bin/a", text: "x",
			raw: func(h *zip.FileHeader) { h.CRC32++ }}),
		with("unknown compression", entry{name: "alpha/bin/a", text: "x",
			raw: func(h *zip.FileHeader) { h.Method = 99 }}),
		{"missing plugin", zipped(good()[1:]...), "alpha/alpha.so"},
	}
}

// bound is how long any hostile row may take. Most take a millisecond; a killed pip gets a grace
// of two seconds, and the rest is room for a busy machine.
const bound = 10 * time.Second

// TestHostile is one table of everything that can go wrong, each with the code it must give. A
// failed installation must leave nothing that looks installed, and nothing anywhere else.
func TestHostile(t *testing.T) {
	type row struct {
		name    string
		data    []byte                           // of the wheel; nil means an honest one
		prepare func(t *testing.T, x *fixture)   // before the act
		change  func(in *Installer, x *fixture)  // of the installer
		act     func(*testing.T, *fixture) error // nil means Install
		want    diag.Code
		mention string
	}
	var rows []row
	for _, h := range hostileWheels() {
		data := h.data
		if data == nil {
			data = []byte{}
		}
		rows = append(rows, row{name: h.name, data: data, want: diag.EngineArchive, mention: h.mention})
	}
	// spoil installs, changes the result, and opens.
	spoil := func(name, mention string, change func(t *testing.T, folder string)) row {
		return row{name: name, want: diag.EngineUntrusted, mention: mention,
			act: func(t *testing.T, x *fixture) error {
				if _, err := x.installer().Install(t.Context(), "alpha"); err != nil {
					t.Fatal(err)
				}
				change(t, filepath.Join(x.dir, "alpha"))
				_, err := x.table.open(t.Context(), x.dir, "alpha", false)
				return err
			}}
	}
	overwrite := func(name, text string) func(*testing.T, string) {
		return func(t *testing.T, folder string) {
			(&fixture{}).write(t, filepath.Join(folder, name), []byte(text))
		}
	}
	// script makes pip a shell script.
	script := func(name string, want diag.Code, mention, text string) row {
		return row{name: name, want: want, mention: mention, change: func(in *Installer, _ *fixture) {
			in.From, in.Pip = nil, []string{"/bin/sh", "-c", text, "pip"}
		}}
	}
	size := strings.Repeat("machine code ", 1000)
	rows = append(rows,
		row{name: "wrong digest", want: diag.EngineDigest, mention: wheelName,
			prepare: func(_ *testing.T, x *fixture) {
				x.pin(func(p *pin) { p.SHA256 = strings.Repeat("0", 64) })
			}},
		row{name: "wrong tree", want: diag.EngineDigest, mention: "alpha",
			prepare: func(_ *testing.T, x *fixture) {
				x.table.engines[0].trees["test/host"] = strings.Repeat("0", 64)
			}},
		row{name: "larger than pinned", want: diag.EngineArchive, mention: "over the pinned",
			prepare: func(_ *testing.T, x *fixture) { x.pin(func(p *pin) { p.Unpacked = 13_025 }) }},
		row{name: "from another wheel", want: diag.BadInput, mention: "alpha-pjrt==1.0",
			change: func(in *Installer, x *fixture) {
				other := filepath.Join(x.home, "wheels", "beta-1.0-py3-none-any.whl")
				in.From = []string{other}
				_ = os.WriteFile(other, []byte("x"), 0o644)
			}},
		row{name: "from a wheel of the right name", want: diag.EngineDigest, mention: "want",
			change: func(in *Installer, x *fixture) {
				in.From = []string{filepath.Join(x.wheels, wheelName)}
				_ = os.WriteFile(in.From[0], []byte("x"), 0o644)
			}},
		row{name: "from nowhere", want: diag.FileError, mention: "gone",
			change: func(in *Installer, x *fixture) { in.From = []string{filepath.Join(x.home, "gone")} }},
		row{name: "unknown engine", want: diag.EngineUnknown, mention: `did you mean "alpha"?`,
			act: func(t *testing.T, x *fixture) error {
				_, err := x.installer().Install(t.Context(), "alhpa")
				return err
			}},
		row{name: "unknown host", want: diag.EngineHost, mention: "plan9/mips",
			prepare: func(_ *testing.T, x *fixture) { x.table.host = "plan9/mips" }},
		row{name: "data folder is a file", want: diag.EngineWrite, mention: "DEEPWELL_HOME",
			prepare: func(t *testing.T, x *fixture) { x.write(t, filepath.Dir(x.dir), []byte("x")) }},
		row{name: "not installed", want: diag.EngineMissing, mention: "deepwell engine install alpha",
			act: func(t *testing.T, x *fixture) error {
				_, err := x.table.open(t.Context(), x.dir, "alpha", false)
				return err
			}},
		row{name: "another release", want: diag.EngineMissing, mention: "alpha-pjrt==1.1",
			act: func(t *testing.T, x *fixture) error {
				if _, err := x.installer().Install(t.Context(), "alpha"); err != nil {
					t.Fatal(err)
				}
				x.table.engines[0].wheels[0].Version = "1.1"
				_, err := x.table.open(t.Context(), x.dir, "alpha", false)
				return err
			}},

		row{name: "no pip", want: diag.EngineDownload, mention: "--from",
			prepare: func(t *testing.T, _ *fixture) { t.Setenv("PATH", t.TempDir()) },
			change:  func(in *Installer, _ *fixture) { in.From = nil }},
		row{name: "pip is not there", want: diag.EngineDownload, mention: "--from",
			change: func(in *Installer, x *fixture) {
				in.From, in.Pip = nil, []string{filepath.Join(x.home, "pip")}
			}},
		script("pip fails", diag.EngineDownload, "no such package",
			`echo collecting; echo "no such package" >&2; exit 1`),
		script("pip brings nothing", diag.EngineDownload, "0 wheels", `exit 0`),
		script("pip brings another wheel", diag.EngineDigest, wheelName,
			`while [ "$1" != --dest ]; do shift; done; echo x > "$2/`+wheelName+`"`),
		row{name: "pip hangs", want: diag.Canceled, mention: "downloading",
			act: hangingPip},

		spoil("corrupt manifest", "manifest.json", overwrite("manifest.json", "{")),
		spoil("empty manifest", "manifest.json", overwrite("manifest.json", `{"version":1}`)),
		spoil("later manifest", "manifest.json", overwrite("manifest.json", `{"version":9}`)),
		spoil("no manifest", "manifest.json", func(_ *testing.T, folder string) {
			_ = os.Remove(filepath.Join(folder, "manifest.json"))
		}),
		spoil("forged manifest", "manifest.json", func(t *testing.T, folder string) {
			m, err := readManifest(folder)
			if err != nil {
				t.Fatal(err)
			}
			const form = `{"version":1,"engine":"alpha","packages":[%q],"files":[]}`
			overwrite("manifest.json", fmt.Sprintf(form, m.Packages[0]))(t, folder)
		}),
		spoil("changed plugin", "alpha/alpha.so", overwrite("alpha/alpha.so", size[1:]+"x")),
		spoil("longer plugin", "alpha/alpha.so", overwrite("alpha/alpha.so", size+"x")),
		spoil("extra library", "libcudart.so.13", overwrite("alpha/libcudart.so.13", "x")),
		spoil("no plugin", "alpha/alpha.so", func(_ *testing.T, folder string) {
			_ = os.Remove(filepath.Join(folder, "alpha/alpha.so"))
		}),
		spoil("plugin is a link", "alpha/alpha.so", func(_ *testing.T, folder string) {
			plugin := filepath.Join(folder, "alpha/alpha.so")
			_ = os.Rename(plugin, filepath.Join(folder, "../../moved"))
			_ = os.Symlink(filepath.Join(folder, "../../moved"), plugin)
		}),

		row{name: "killed in the middle", want: diag.EngineMissing, mention: "not installed",
			act: killed},
		row{name: "two at once", want: diag.EngineBusy, mention: "by process ", act: twoAtOnce},
	)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			start := time.Now()
			data := r.data
			if data == nil {
				data = zipped(good()...)
			}
			x := newFixture(t, data)
			if r.prepare != nil {
				r.prepare(t, x)
			}
			act := r.act
			if act == nil {
				act = func(t *testing.T, x *fixture) error {
					in := x.installer()
					if r.change != nil {
						r.change(in, x)
					}
					_, err := in.Install(t.Context(), "alpha")
					x.clean(t)
					return err
				}
			}
			err := act(t, x)
			e := diag.From(err)
			if e == nil || e.Code != r.want || !strings.Contains(e.Format(), r.mention) {
				t.Errorf("want %s that mentions %q, got %v", r.want, r.mention, err)
			}
			if took := time.Since(start); took > bound {
				t.Errorf("took %v", took)
			}
		})
	}
}

// pin changes the pin of the only wheel.
func (x *fixture) pin(change func(*pin)) {
	pins := x.table.engines[0].wheels[0].Pins
	p := pins["test/host"]
	change(&p)
	pins["test/host"] = p
}

// clean wants nothing but the lock in the engines' folder and nothing unknown beside it.
func (x *fixture) clean(t *testing.T) {
	t.Helper()
	for _, name := range x.installed(t) {
		if !strings.HasSuffix(name, " .alpha.lock") {
			t.Errorf("left behind: %s", name)
		}
	}
	entries, err := os.ReadDir(x.home)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); name != "data" && name != "wheels" {
			t.Errorf("written outside the folder: %s", name)
		}
	}
}

// hangingPip cancels an installation whose pip, and whose pip's child, would sleep for a minute.
func hangingPip(t *testing.T, x *fixture) error {
	in := x.installer()
	alive := filepath.Join(x.home, "wheels", "alive")
	in.From, in.Pip = nil, []string{"/bin/sh", "-c", `sleep 60 & echo $! > ` + alive + `; wait`, "pip"}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			if text, err := os.ReadFile(alive); err == nil && len(text) > 0 {
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	_, installErr := in.Install(ctx, "alpha")
	x.clean(t)
	pid, err := os.ReadFile(alive)
	if err != nil {
		t.Fatal(err)
	}
	stat := "/proc/" + strings.TrimSpace(string(pid)) + "/stat"
	for range 1000 { // the kernel needs a moment to bury the dead
		state, err := os.ReadFile(stat)
		if err != nil || strings.Contains(string(state), ") Z ") {
			return installErr
		}
		time.Sleep(time.Millisecond)
	}
	t.Error("pip's child outlived the cancel")
	return installErr
}

// The environment of the helper process: where to install, and where its wheel is.
const helperDir = "DEEPWELL_TEST_HELPER"

// helper installs the made-up engine in a process of its own and stops for good at the first
// progress of unpacking, to be killed there. It says "unpacking" before.
func helper(home string) {
	x := build(home, zipped(good()...))
	in := x.installer()
	in.Events = stopAtUnpack{}
	_, err := in.Install(context.Background(), "alpha")
	fmt.Println("done", err)
}

type stopAtUnpack struct{}

func (stopAtUnpack) Emit(e event.Event) {
	if p, ok := e.(event.Progress); ok && strings.HasPrefix(p.Task, "unpack") {
		fmt.Println("unpacking")
		time.Sleep(time.Hour)
	}
}

// startHelper starts a process that is in the middle of an installation when this returns.
func startHelper(t *testing.T, x *fixture) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), helperDir+"="+x.home)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "unpacking\n" {
		t.Fatalf("helper said %q, %v", line, err)
	}
	return cmd
}

// killed kills an installation with SIGKILL. What it leaves must not look installed, and the next
// installation must clean up.
func killed(t *testing.T, x *fixture) error {
	cmd := startHelper(t, x)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left, _ := filepath.Glob(filepath.Join(x.dir, leftovers("alpha"))); len(left) == 0 {
		t.Error("the kill left nothing: it came too late to show anything")
	}
	if all, err := x.table.list(x.dir); err != nil || all[0].Installed {
		t.Errorf("looks installed: %+v, %v", all, err)
	}
	_, opened := x.table.open(t.Context(), x.dir, "alpha", false)
	if _, err := x.installer().Install(t.Context(), "alpha"); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(x.dir, leftovers("alpha"))); len(left) != 0 {
		t.Errorf("leftovers of the killed installation: %q", left)
	}
	return opened
}

// twoAtOnce installs while another process does. The second waits as long as its context lasts,
// and names the first; when the first is gone, the one that still waits goes on.
func twoAtOnce(t *testing.T, x *fixture) error {
	cmd := startHelper(t, x)
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	_, busy := x.installer().Install(ctx, "alpha")
	want := fmt.Sprintf("by process %d", cmd.Process.Pid)
	if busy == nil || !strings.Contains(busy.Error(), want) {
		t.Errorf("does not say %q: %v", want, busy)
	}
	if err := x.table.remove(x.dir, "alpha"); diag.From(err).Code != diag.EngineMissing {
		t.Errorf("remove: %v", err)
	}
	waited := make(chan error)
	seen := &event.Recorder{}
	go func() {
		in := x.installer()
		in.Events = seen
		_, err := in.Install(t.Context(), "alpha")
		waited <- err
	}()
	time.Sleep(2 * lockPoll)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := <-waited; err != nil {
		t.Errorf("the one that waited: %v", err)
	}
	if note, ok := seen.Events()[0].(event.Note); !ok || !strings.HasPrefix(note.Text, "waiting: ") {
		t.Errorf("the one that waited did not say so: %+v", seen.Events()[0])
	}
	return busy
}

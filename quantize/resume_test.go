package quantize

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// victim is how a test tells a child of its own binary to quantize, from where to where.
const victim = "DEEPWELL_TEST_QUANTIZE"

func TestMain(m *testing.M) {
	from, to, ok := strings.Cut(os.Getenv(victim), "\n")
	if !ok {
		os.Exit(m.Run())
	}
	fmt.Println("ready")
	if _, err := Quantize(context.Background(), from, to, small); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// small makes many files of little work.
var small = Options{To: dtype.NVFP4, MaxBytes: 300 << 10}

// layers is a model of some megabytes in several shards.
func layers(t *testing.T, n int64) string {
	t.Helper()
	dir := t.TempDir()
	shapes := map[string][]int64{"model.embed_tokens.weight": {500, 256}, "model.norm.weight": {256}}
	for i := range n {
		p := fmt.Sprintf("model.layers.%d.", i)
		maps.Copy(shapes, map[string][]int64{
			p + "self_attn.q_proj.weight": {256, 256}, p + "self_attn.k_proj.weight": {64, 256},
			p + "self_attn.v_proj.weight": {64, 256}, p + "self_attn.o_proj.weight": {256, 256},
			p + "mlp.gate_proj.weight": {512, 256}, p + "mlp.up_proj.weight": {512, 256},
			p + "mlp.down_proj.weight": {256, 512}, p + "input_layernorm.weight": {256}})
	}
	write(t, dir, `{"model_type": "llama"}`, shapes, 1<<20)
	must(t, os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte("{}"), 0o644))
	return dir
}

// A process that is killed anywhere, again and again, ends with the bytes of one that was not.
func TestKilledAnywhere(t *testing.T) {
	dir, clean := layers(t, 6), t.TempDir()
	start := time.Now()
	quantize(t, dir, clean, small)
	whole := time.Since(start)
	want := contents(t, clean)
	rounds, kills := 3, 0
	if slowtest.Enabled {
		rounds = 20
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range rounds {
		out := t.TempDir()
		for try := 0; ; try++ {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), victim+"="+dir+"\n"+out)
			pipe, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			if _, err := bufio.NewReader(pipe).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if try < 8 {
				time.Sleep(time.Duration(rng.Int64N(int64(whole) / 2)))
				_ = cmd.Process.Kill()
			}
			if err := cmd.Wait(); err == nil {
				break
			}
			if kills++; try == 8 {
				t.Fatal("it does not end")
			}
		}
		if got := contents(t, out); !maps.Equal(got, want) {
			t.Fatalf("other files: %v, want %v", names(got), names(want))
		}
	}
	t.Logf("%d kills in %d runs", kills, rounds)
}

func names(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// Work that goes on leaves what was done as it is.
func TestGoesOn(t *testing.T) {
	dir, out := layers(t, 4), t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for ctx.Err() == nil {
			if done, _ := filepath.Glob(filepath.Join(out, StateName, "*.safetensors.json")); len(done) > 2 {
				cancel()
			}
		}
	}()
	_, err := Quantize(ctx, dir, out, small)
	if err == nil {
		t.Skip("it was faster")
	}
	if e := diag.From(err); e.Code != diag.Canceled {
		t.Fatal(err)
	}
	before := map[string]os.FileInfo{}
	done, _ := filepath.Glob(filepath.Join(out, "model-*.safetensors"))
	for _, path := range done {
		before[path], err = os.Stat(path)
		must(t, err)
	}
	// A file that a kill left half-written has a name with a dot.
	must(t, os.WriteFile(filepath.Join(out, ".model-00009.123"), []byte("half"), 0o644))

	// Other work is refused while this is half-written, and nothing is touched.
	other := small
	other.To = dtype.MXFP8
	if _, err := Quantize(t.Context(), dir, out, other); diag.From(err).Code != diag.FolderForeign {
		t.Errorf("other work: %v", err)
	}
	r := quantize(t, dir, out, small)
	kept := 0
	for path, info := range before {
		now, err := os.Stat(path)
		must(t, err)
		if os.SameFile(info, now) {
			kept++
		}
	}
	if kept < 2 {
		t.Errorf("%d of %d files were kept", kept, len(before))
	}
	clean := t.TempDir()
	quantize(t, dir, clean, small)
	if got, want := contents(t, out), contents(t, clean); !maps.Equal(got, want) {
		t.Errorf("other files: %v, want %v", names(got), names(want))
	}

	// The same work again is done already, also where a kill came while the state was removed; other
	// work is refused.
	must(t, os.MkdirAll(filepath.Join(out, StateName), 0o755))
	must(t, os.WriteFile(filepath.Join(out, StateName, "rest"), nil, 0o644))
	again := quantize(t, dir, out, small)
	if got, want := contents(t, out), contents(t, clean); !maps.Equal(got, want) {
		t.Errorf("other files: %v, want %v", names(got), names(want))
	}
	if again.Key != r.Key || len(again.Tensors) != len(r.Tensors) {
		t.Error("another report")
	}
	if _, err := Quantize(t.Context(), dir, out, other); diag.From(err).Code != diag.FolderForeign {
		t.Errorf("other work: %v", err)
	}
	must(t, os.Truncate(filepath.Join(out, r.Files[0]), 100))
	if _, err := Quantize(t.Context(), dir, out, small); diag.From(err).Code != diag.FolderForeign {
		t.Errorf("a truncated file: %v", err)
	}
}

// A folder that holds something else is refused by the name of it.
func TestForeignFolder(t *testing.T) {
	dir, out := layers(t, 1), t.TempDir()
	must(t, os.WriteFile(filepath.Join(out, "notes.txt"), []byte("mine"), 0o644))
	_, err := Quantize(t.Context(), dir, out, small)
	if e := diag.From(err); e.Code != diag.FolderForeign || !strings.Contains(e.What, "notes.txt") {
		t.Errorf("%v", err)
	}
	if got := names(contents(t, out)); len(got) != 1 {
		t.Errorf("%v", got)
	}
	// Another process is at it.
	lock, err := acquire(out)
	must(t, err)
	defer lock.Close()
	if _, err := Quantize(t.Context(), dir, out, small); diag.From(err).Code != diag.CheckpointBusy {
		t.Errorf("%v", err)
	}
}

// The number of workers does not change a byte, nor a digit of the report.
func TestSameBytes(t *testing.T) {
	dir := layers(t, 2)
	var first map[string]string
	for _, workers := range []int{1, 2, 7} {
		o := small
		o.Workers = workers
		out := t.TempDir()
		quantize(t, dir, out, o)
		if got := contents(t, out); first == nil {
			first = got
		} else if !maps.Equal(first, got) {
			t.Errorf("%d workers write other bytes", workers)
		}
	}
}

// A matrix of 2 GiB, in a file that is one hole, passes through little memory. The bound of all
// work is 1 GB; 512 MB are the shelf twice, and workers.
func TestMemory(t *testing.T) {
	slowtest.Only(t)
	const size = 2 << 30
	dir, out := t.TempDir(), t.TempDir()
	header := fmt.Sprintf(`{"l.0.up_proj.weight":{"dtype":"BF16","shape":[%d,8192],"data_offsets":[0,%d]}}`,
		size/2/8192, size)
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	path := filepath.Join(dir, "model.safetensors")
	must(t, os.WriteFile(path, append(file, header...), 0o644))
	must(t, os.Truncate(path, int64(8+len(header)+size)))
	must(t, os.WriteFile(filepath.Join(dir, configName), []byte("{}"), 0o644))
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victim+"="+dir+"\n"+out)
	must(t, cmd.Run())
	peak := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss >> 10
	t.Logf("%d MiB", peak)
	if peak > 512 {
		t.Errorf("%d MiB of memory", peak)
	}
}

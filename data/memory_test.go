//go:build linux

package data

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/internal/slowtest"
)

// childLimit is the address space of a child: enough for a test binary, and far below what the
// host has.
const childLimit = 6 << 30

// readInChild tokenizes a file in a process of its own and gives what that said, and its largest
// resident set in bytes. The token cache, which is mapped, does not count: it is a file, whose
// pages the kernel takes back when it needs them.
func readInChild(t *testing.T, path string) (out string, rss int64) {
	t.Helper()
	var b bytes.Buffer
	cmd := exec.Command(os.Args[0], "-test.run", "^TestReadInChild$", "-test.v")
	cmd.Env = append(os.Environ(), "DEEPWELL_TEST_READ="+path)
	cmd.Stdout, cmd.Stderr = &b, &b
	_ = cmd.Run() // what it says tells
	out = b.String()
	if i := strings.Index(out, "goroutine "); i > 0 {
		out = out[:i]
	}
	rss = cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10
	if _, text, ok := strings.Cut(out, "VmHWM:"); ok { // Maxrss is not below what this process had
		_, _ = fmt.Sscanf(text, "%d", &rss)
		rss <<= 10
	}
	if _, counts, ok := strings.Cut(out, "done: "); ok {
		var tokens, sys int64
		_, _ = fmt.Sscanf(counts, "%d tokens, heap %d", &tokens, &sys)
		rss = max(rss-2*tokens, sys) // a token has two bytes
		if slowtest.Raced {
			rss = sys // the resident set holds the race detector's shadow of it as well
		}
	}
	return out, rss
}

// TestReadInChild is the child of readInChild.
func TestReadInChild(t *testing.T) {
	path := os.Getenv("DEEPWELL_TEST_READ")
	if path == "" {
		t.Skip("it runs in a child of other tests")
	}
	defer func() {
		status, _ := os.ReadFile("/proc/self/status")
		_, peak, _ := strings.Cut(string(status), "VmHWM:")
		peak, _, _ = strings.Cut(peak, "\n")
		fmt.Println("VmHWM:", peak)
	}()
	if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: childLimit, Max: childLimit}); err != nil {
		t.Fatal(err)
	}
	l, err := tryOpen(t, Options{Sources: []Source{{Path: path}}})
	if err != nil {
		fmt.Println("refused:", err)
		return
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m) // Sys is all that was ever asked of the kernel
	fmt.Println("done:", l.Tokens(), "tokens, heap", m.Sys, l.Stats()[0].Documents, "documents")
}

// One bit of the file was flipped, which makes its codec LZ4_RAW: finding A8, where the library
// that read it doubled a buffer until the host had no memory left. The child has a limit, as Go
// cannot recover from that.
func TestParquetOfOneFlippedBitIsRefused(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("testdata", "text.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	raw[1660] = 0x0e
	dir := write(t, map[string]string{"onebit.parquet": string(raw)})
	out, rss := readInChild(t, filepath.Join(dir, "onebit.parquet"))
	if !strings.Contains(out, "DW2803") || rss > 200<<20 {
		t.Errorf("%d MiB: %s", rss>>20, out)
	}
}

// packedFile writes a .gz of a text that is said over and over, and a head and a tail.
func packedFile(t *testing.T, path, head, text, tail string, size int) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, _ := gzip.NewWriterLevel(f, gzip.BestSpeed)
	block := []byte(strings.Repeat(text, max(1, 1<<16/len(text))))
	_, _ = z.Write([]byte(head))
	for n := 0; n < size; n += len(block) {
		_, _ = z.Write(block)
	}
	_, _ = z.Write([]byte(tail))
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
}

// bombs are files that are short on disk and took many gigabytes of memory: finding A9.
var bombs = []struct {
	name, head, text, tail string
	size                   int // in full
	want                   string
}{
	{"x.txt.gz", "", "x", "", 511 << 20, "done:"},
	{"x.jsonl.gz", `{"text":"`, "x", "\"}\n", 511 << 20, "x.jsonl.gz:1"},
	{"blanks.txt.gz", "", " ", "", 60 << 20, "done:"},
	{"nobreak.txt.gz", "", "日", "", 60 << 20, "done:"},
	{"parts.jsonl.gz", `{"messages":[{"role":"user","content":[{"text":"a"}`, `,{"text":"a"}`, "]}]}\n",
		45 << 20, "parts.jsonl.gz:1"},
}

// Documents take bounded memory, whatever the file is: each is read or refused by name. Beyond the
// limit nothing grows with the size, so that 20 MiB show as much as the whole, which takes minutes.
func TestBombsAreReadInBoundedMemory(t *testing.T) {
	for _, b := range bombs {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), b.name)
			size := 20 << 20
			if slowtest.Enabled {
				size = b.size
			}
			packedFile(t, path, b.head, b.text, b.tail, size)
			out, rss := readInChild(t, path)
			if !strings.Contains(out, b.want) || rss > 1<<30 {
				t.Errorf("%d MiB, want %q: %.400s", rss>>20, b.want, out)
			}
			if b.want != "done:" && !strings.Contains(out, "data.document_mib = ") &&
				!strings.Contains(out, "split it into several documents") {
				t.Errorf("there is no way out: %.400s", out)
			}
			t.Logf("%d MiB: %.100s", rss>>20, out)
		})
	}
}

// What is just within the limit is read, below 1 GiB.
func TestDocumentsAtTheLimitTakeBoundedMemory(t *testing.T) {
	for _, b := range bombs {
		if b.want == "done:" && !slowtest.Enabled {
			continue // it is read in chunks here as well
		}
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), b.name)
			packedFile(t, path, b.head, b.text, b.tail, DefaultDocument-1<<18)
			out, rss := readInChild(t, path)
			if !strings.Contains(out, "done:") || rss > 1<<30 {
				t.Errorf("%d MiB: %.400s", rss>>20, out)
			}
			t.Logf("%d MiB: %.100s", rss>>20, out)
		})
	}
}

// readBytes tells how many bytes this process has read from files and pipes.
func readBytes(t *testing.T) (n int64) {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/io")
	if err != nil {
		t.Skip(err)
	}
	if _, err := fmt.Sscanf(string(raw), "rchar: %d", &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Starting again does not read a corpus that has not changed: finding A23.
func TestUnchangedFilesAreNotReadAgain(t *testing.T) {
	const size = 8 << 20
	text := strings.Repeat("the quick brown fox jumps over the lazy dog.\n", size/45)
	dir := write(t, map[string]string{"a.txt": text, "b.txt": text + "x"})
	tok, tokens := newTokenizer(t, "<|endoftext|>"), t.TempDir()
	written := time.Now() // stands still: a slow machine takes longer than files count as just written
	at := func() time.Time { return written }
	later := func() time.Time { return written.Add(time.Hour) }
	read := func(now func() time.Time) (digest string, n int64) {
		before := readBytes(t)
		l := open(t, Options{Sources: []Source{{Path: dir}}, Tokenizer: tok, Cache: tokens, now: now})
		return l.Digest(), readBytes(t) - before
	}
	first, _ := read(at)
	if d, n := read(at); n < size || d != first {
		t.Errorf("files that were just written: %d bytes read, digest %s and %s", n, d, first)
	}
	if d, n := read(later); n < 2*size-1<<20 || d != first {
		t.Errorf("sums that are not known: %d bytes read, digest %s and %s", n, d, first)
	}
	if d, n := read(later); n > 1<<18 || d != first {
		t.Errorf("nothing changed: %d bytes read, digest %s and %s", n, d, first)
	}

	// The same size and the same time of writing: the inode has another.
	path := filepath.Join(dir, "b.txt")
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("x"+text), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	second, n := read(later)
	if n < size || second == first {
		t.Errorf("a file changed: %d bytes read, digest %s and %s", n, second, first)
	}
	if d, n := read(later); n > 1<<18 || d != second {
		t.Errorf("nothing changed since: %d bytes read, digest %s and %s", n, d, second)
	}

	// Sums that are damaged count for nothing.
	list, err := filepath.Glob(filepath.Join(tokens, "*"+sumsSuffix))
	if err != nil || len(list) != 1 {
		t.Fatalf("%v %v", list, err)
	}
	raw, err := os.ReadFile(list[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, damaged := range [][]byte{nil, []byte("\n"), raw[:len(raw)-1], bytes.ToUpper(raw), append(bytes.Clone(raw), '\n'),
		bytes.Replace(raw, raw[len(raw)-4:len(raw)-1], []byte("zzz"), 1)} {
		if err := os.WriteFile(list[0], damaged, 0o666); err != nil {
			t.Fatal(err)
		}
		if d, n := read(later); n < size || d != second {
			t.Errorf("%d bytes of damaged sums: %d bytes read, digest %s and %s", len(damaged), n, d, second)
		}
	}
}

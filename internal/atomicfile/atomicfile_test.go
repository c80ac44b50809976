package atomicfile

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// umaskEnv is how the test's own binary is made to write a file; a umask is of a whole process.
const umaskEnv = "ATOMICFILE_TEST_UMASK"

func TestMain(m *testing.M) {
	text := os.Getenv(umaskEnv)
	if text == "" {
		os.Exit(m.Run())
	}
	mask, err := strconv.ParseInt(text, 8, 32)
	if err == nil {
		syscall.Umask(int(mask))
		err = Write(os.Args[1], []byte("x"), 0o666)
	}
	if err != nil {
		os.Exit(1)
	}
}

func TestUmaskIsRespected(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for mask, want := range map[string]os.FileMode{"077": 0o600, "022": 0o644, "000": 0o666} {
		cmd := exec.Command(os.Args[0], path)
		cmd.Env = append(os.Environ(), umaskEnv+"="+mask)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("umask %s: mode %v, want %v", mask, info.Mode(), want)
		}
	}
}

func TestWriteReplacesWholeOrNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := Write(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	stop := errors.New("stop")
	err := WriteFunc(path, 0o600, func(w io.Writer) error {
		if _, err := io.WriteString(w, "half"); err != nil {
			return err
		}
		return stop
	})
	if !errors.Is(err, stop) {
		t.Fatalf("error %v", err)
	}
	got, err := os.ReadFile(path)
	if err != nil || string(got) != "old" {
		t.Errorf("file holds %q, %v", got, err)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("%d files are left, %v", len(left), err)
	}
}

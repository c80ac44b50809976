package malloc

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestMain lets the test's own binary stand for a program that calls Exec.
func TestMain(m *testing.M) {
	if os.Getenv("RESIDENT_TEST") != "" {
		before := os.Getpid()
		if err := Exec(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(before, os.Getenv(variable), strings.Join(os.Args[1:], " "))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func run(t *testing.T, env ...string) (pid int, out string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "one", "two words")
	cmd.Env = append(env, "RESIDENT_TEST=1")
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, strings.TrimSpace(string(text))
}

func TestExec(t *testing.T) {
	for _, test := range []struct{ name, env, want string }{
		{"fresh", "A=b", Tunables + " one two words"},
		{"already", variable + "=" + Tunables, Tunables + " one two words"},
		{"the user's own", variable + "=glibc.malloc.arena_max=4",
			"glibc.malloc.arena_max=4 one two words"},
		{"the user's own, old names", "MALLOC_ARENA_MAX=4", " one two words"},
	} {
		t.Run(test.name, func(t *testing.T) {
			pid, out := run(t, test.env)
			if want := fmt.Sprint(pid) + " " + test.want; out != want {
				t.Errorf("got %q, want %q", out, want)
			}
		})
	}
}

package softgpu_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/softgpu"
)

// Whatever is not played ends the process with its name. The program of testdata does one of it.
func TestUnplayedEndsTheProcessByName(t *testing.T) {
	g := softgpu.Build(t)
	program := compile(t, g, "unplayed", "libcuda.so.1", "libnvidia-ml.so.1")
	for what, says := range map[string]string{
		"function":    "function cuTexRefCreate of libcuda.so.1",
		"nvml":        "function nvmlDeviceGetBoardId of libnvidia-ml.so.1",
		"binary":      "kernel secret, which has no PTX",
		"instruction": "kernel strange",
		"conditional": "a graph's node of type 13",
		"cluster":     "kernel plain with launch attribute 4",
	} {
		cmd := exec.CommandContext(t.Context(), program, what)
		cmd.Env = g.Env(softgpu.Options{})
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != softgpu.Unplayed || !strings.Contains(string(out), says) {
			t.Errorf("%s: %v\n%s", what, err, out)
		}
	}
	cmd := exec.CommandContext(t.Context(), program, "refused")
	cmd.Env = g.Env(softgpu.Options{})
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("a function of refused.txt: %v\n%s", err, out)
	}
}

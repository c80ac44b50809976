package environ

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// Every variable that changes numbers is refused, or known to the cache, or known to checkpoints.
func TestEveryVariableHasARole(t *testing.T) {
	for _, row := range []struct {
		set                      string
		refused, keyed, compared bool
		recorded                 bool
	}{
		{set: "XLA_FLAGS=--xla_cpu_enable_fast_math=true", refused: true},
		{set: "TF_XLA_FLAGS=--tf_xla_auto_jit=2", refused: true},
		{set: "XLA_FLAGS= "},
		{set: "XLA_SOMETHING=1", keyed: true, compared: true, recorded: true},
		{set: "NVIDIA_TF32_OVERRIDE=0", keyed: true, compared: true, recorded: true},
		{set: "CUBLAS_WORKSPACE_CONFIG=:4096:8", keyed: true, compared: true, recorded: true},
		{set: "TF_CUDNN_DETERMINISTIC=1", keyed: true, compared: true, recorded: true},
		{set: "CUDNN_FRONTEND_X=1", keyed: true, compared: true, recorded: true},
		{set: "LD_PRELOAD=/lib/x.so", keyed: true, compared: true, recorded: true},
		{set: "NPROC=4", keyed: true, compared: true, recorded: true},
		{set: "NCCL_ALGO=Ring", compared: true, recorded: true},
		{set: "NCCL_SOCKET_IFNAME=eth0", recorded: true},
		{set: "NCCL_DEBUG=INFO"}, {set: "CUBLAS_LOGINFO_DBG=1"}, {set: "TF_CPP_MIN_LOG_LEVEL=0"},
		{set: "TF_VAR_password=secret"},
		{set: "PATH=/bin"}, {set: "XLA_FLAGSHIP"}, {set: "GLIBC_TUNABLES=x"},
	} {
		s, err := Read([]string{"HOME=/root", row.set})
		if refused := err != nil; refused != row.refused {
			t.Errorf("%s: %v", row.set, err)
			continue
		} else if refused {
			if e := diag.From(err); e.Code != diag.EnvRefused || e.Fix == "" {
				t.Errorf("%s: %v", row.set, err)
			}
			continue
		}
		names := slices.Collect(maps.Keys(s.Recorded()))
		if keyed := len(s.Key()) > 0; keyed != row.keyed || len(names) > 0 != row.recorded ||
			row.recorded && Compares(names[0]) != row.compared {
			t.Errorf("%s: keyed %v, recorded %v", row.set, keyed, names)
		}
	}
}

// A refused variable that the user insists on is part of the key, and so is the file it names.
func TestAllowedVariablesAreKeyed(t *testing.T) {
	read := func(list ...string) *Set {
		t.Helper()
		s, err := Read(append(list, Allow+"=TF_XLA_FLAGS, XLA_FLAGS"))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	one, two := read("XLA_FLAGS=--a=1"), read("XLA_FLAGS=--a=2")
	if bytes.Equal(one.Key(), two.Key()) || !slices.Equal(one.Allowed(), []string{"XLA_FLAGS"}) {
		t.Errorf("%q and %q, %v", one.Key(), two.Key(), one.Allowed())
	}
	file := filepath.Join(t.TempDir(), "flags")
	write := func(text string) *Set {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return read("XLA_FLAGS=" + file)
	}
	if bytes.Equal(write("--a=1").Key(), write("--a=2").Key()) {
		t.Error("a file of flags changes, and the key does not")
	}
	if one.Dumps() || !read("XLA_FLAGS=--a=1 --xla_dump_to=d").Dumps() || write("--a=1").Dumps() ||
		!write("--xla_dump_hlo_as_text").Dumps() ||
		!read("XLA_FLAGS=--xla_gpu_dump_autotune_results_to=f").Dumps() {
		t.Error("flags by which XLA writes files are not known by their name")
	}
	if _, err := Read([]string{"XLA_FLAGS=/nowhere/flags", Allow + "=XLA_FLAGS"}); err == nil {
		t.Error("a file of flags that is not there is taken")
	}
	if len(read().Key()) != 0 {
		t.Error("an environment without such variables has a key")
	}
}

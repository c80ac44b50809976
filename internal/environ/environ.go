package environ

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// Allow is the variable that lists refused variables which the user wants all the same.
const Allow = "DEEPWELL_ALLOW_ENV"

// DumpFlags tells whether a text has the name of a flag of XLA that writes files as it compiles,
// such as xla_dump_to or xla_gpu_dump_autotune_results_to.
func DumpFlags(text string) bool {
	return strings.Contains(text, "xla_dump") || strings.Contains(text, "_dump_")
}

// A role is what is done about a variable that is set.
type role int

const (
	ignore role = iota // does not change results
	note               // recorded: differs from host to host, but does not change results
	record             // recorded, and compared with a checkpoint's and other processes'
	key                // recorded and compared, and part of the key of compiled programs
	refuse             // not taken; if the user insists, as key
)

// table says what is done about each variable. The first row that a name matches counts; one that
// ends in * is a prefix. Variables that match no row are ignored.
var table = []struct {
	name string
	role role
	why  string
}{
	{"XLA_FLAGS", refuse, "changes what every program is compiled to, fast math included, and a flag" +
		" that XLA does not know ends the process"},
	{"TF_XLA_FLAGS", refuse, "as XLA_FLAGS"},
	{"XLA_*", key, "XLA reads others as well, and new versions new ones"},
	// Switches that XLA inherits from TensorFlow, one by one: Terraform has TF_ as well, with
	// secrets.
	{"TF_DETERMINISTIC_OPS", key, "chooses algorithms"},
	{"TF_CUDNN_*", key, "chooses algorithms"},
	{"TF_CUBLAS_*", key, "chooses algorithms"},
	{"TF_ENABLE_*", key, "allows matmuls of lower precision"},
	{"TF_DISABLE_*", key, "the other way round"},
	{"NVIDIA_TF32_OVERRIDE", key, "rounds the inputs of products to TF32, or forbids it"},
	{"CUBLAS_LOG*", ignore, "logs"},
	{"CUBLASLT_LOG*", ignore, "logs"},
	{"CUBLAS*", key, "chooses algorithms and workspaces of products, and so the order of sums"},
	{"CUDNN_LOG*", ignore, "logs"},
	{"CUDNN_*", key, "chooses algorithms"},
	{"ONEDNN_VERBOSE*", ignore, "logs"},
	{"ONEDNN_*", key, "allows matmuls of lower precision, and chooses instructions"},
	{"DNNL_VERBOSE*", ignore, "logs"},
	{"DNNL_*", key, "the older names of ONEDNN_*"},
	{"LD_PRELOAD", key, "replaces functions, libm's included; allocators are common, so it is" +
		" not refused"},
	{"LD_AUDIT", key, "as LD_PRELOAD"},
	{"NPROC", key, "is the number of XLA's threads on a CPU, by which it may split sums"},
	{"NCCL_DEBUG*", ignore, "logs"},
	{"NCCL_SOCKET_*", note, "names an interface of the host"},
	{"NCCL_IB_*", note, "names adapters of the host"},
	{"NCCL_*", record, "chooses the algorithm of collectives, and so the order of sums"},
}

// A Set is what of an environment may change numbers.
type Set struct {
	variables []variable // by name
	dumps     bool       // one asks XLA to write what it compiles into files
}

type variable struct {
	name, value string
	role        role
}

// Read finds the variables of an environment, in the form of [os.Environ], that may change numbers.
// It is an error if one of them is refused.
func Read(environ []string) (*Set, error) {
	values, s := map[string]string{}, &Set{}
	for _, one := range environ {
		name, value, _ := strings.Cut(one, "=")
		if _, twice := values[name]; !twice { // C takes the first
			values[name] = value
		}
	}
	allowed := strings.FieldsFunc(values[Allow], func(r rune) bool { return r == ',' || r == ' ' })
	for name, value := range values {
		what, why := judge(name)
		if what == ignore || strings.TrimSpace(value) == "" { // an empty one is as good as none
			continue
		}
		if what == refuse {
			if !slices.Contains(allowed, name) {
				return nil, diag.New(diag.EnvRefused, "the variable %s is set, which %s", name, why).
					At("%s=%s", name, value).
					Try("unset %s; or export %s=%s to have it in the checkpoints and in the key of compiled"+
						" programs", name, Allow, name)
			}
			var flags string
			var err error
			if value, flags, err = contents(name, value); err != nil {
				return nil, err
			}
			s.dumps = s.dumps || DumpFlags(flags)
		}
		s.variables = append(s.variables, variable{name, value, what})
	}
	lists.Sort(s.variables, func(a, b variable) int { return strings.Compare(a.name, b.name) })
	return s, nil
}

func judge(name string) (role, string) {
	for _, row := range table {
		prefix, isPrefix := strings.CutSuffix(row.name, "*")
		if name == row.name || isPrefix && strings.HasPrefix(name, prefix) {
			return row.role, row.why
		}
	}
	return ignore, ""
}

// contents gives the flags of a variable. It adds the digest of a file of flags to its name: XLA
// takes a value that does not begin with a dash for the name of a file.
func contents(name, value string) (recorded, flags string, err error) {
	path := strings.TrimSpace(value)
	if strings.HasPrefix(path, "-") {
		return value, value, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", "", diag.New(diag.EnvRefused, "the variable %s names a file that cannot be read",
			name).At("%s", path).Wrap(err).Try("unset %s", name)
	}
	sum := sha256.Sum256(text)
	return path + " sha256:" + hex.EncodeToString(sum[:]), string(text), nil
}

// Key is a part of the key of a compiled program; it is empty if no variable counts.
func (s *Set) Key() []byte {
	var b []byte
	for _, v := range s.variables {
		if v.role >= key {
			b = fmt.Appendf(b, "%q=%q\n", v.name, v.value)
		}
	}
	return b
}

// Dumps tells whether the flags of an allowed variable make XLA write files as it compiles.
func (s *Set) Dumps() bool { return s.dumps }

// Recorded are the variables that a checkpoint is to know.
func (s *Set) Recorded() map[string]string {
	list := map[string]string{}
	for _, v := range s.variables {
		list[v.name] = v.value
	}
	return list
}

// Allowed names the refused variables that the user insists on.
func (s *Set) Allowed() (names []string) {
	return lists.Pick(s.variables, func(v variable) (string, bool) { return v.name, v.role == refuse })
}

// Compares tells whether a variable must be the same wherever a run goes on, and in all of its
// processes.
func Compares(name string) bool {
	what, _ := judge(name)
	return what >= record
}

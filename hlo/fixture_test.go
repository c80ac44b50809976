package hlo

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
)

func fixture(t testing.TB, name string) *Module {
	t.Helper()
	code, err := os.ReadFile(filepath.Join("testdata", name+".hlo"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := Read("hlo_with_config", code)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func fixtureNames(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.hlo")
	if err != nil || len(files) == 0 {
		t.Fatal("no fixtures", err)
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".hlo")
	}
	return files
}

// summary writes everything the package tells of a program.
func summary(m *Module) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d replicas, %d partitions\n", m.Name, m.NumReplicas, m.NumPartitions)
	for i, p := range m.Params {
		fmt.Fprintf(&b, "param %d %s %d bytes donor=%v\n", i, p.Text, p.Bytes, p.Donor)
	}
	for i, r := range m.Results {
		fmt.Fprintf(&b, "result %d %s %d bytes\n", i, r.Text, r.Bytes)
	}
	for _, a := range m.Aliases {
		fmt.Fprintf(&b, "alias result %d = param %d must=%v\n", a.Result, a.Param, a.Must)
	}
	for _, c := range m.Collectives() {
		fmt.Fprintf(&b, "%s %dx %s of %s, %d -> %d bytes, %s/%s %d of %d%s%s%s%s%s %q\n", c.Kind, c.Count,
			c.Group, c.Shape, c.OperandBytes, c.ResultBytes, c.In, c.Name, c.Operand, c.Operands,
			mark(c.Parts > 0, fmt.Sprintf(" in %d parts", c.Parts)), mark(c.Async, " async"),
			mark(c.Pipelined, " pipelined"), mark(c.TripUnknown, " trip-unknown"),
			mark(c.Branch, " branch"), c.OpName)
	}
	for _, c := range m.CustomCalls() {
		fmt.Fprintf(&b, "%s %dx %d -> %d bytes, workspace %d, plan %s, %s/%s%s%s\n", c.Target, c.Count,
			c.OperandBytes, c.ResultBytes, c.Workspace, c.Plan, c.In, c.Name,
			mark(c.TripUnknown, " trip-unknown"), mark(c.Branch, " branch"))
	}
	for _, o := range m.ops() {
		fmt.Fprintf(&b, "op %s %dx\n", o.opcode, o.count)
	}
	for _, r := range m.Remat() {
		fmt.Fprintf(&b, "remat %s\n", r)
	}
	return b.String()
}

func mark(on bool, text string) string {
	if on {
		return text
	}
	return ""
}

func TestFixturesMatchGoldens(t *testing.T) {
	for _, name := range fixtureNames(t) {
		t.Run(name, func(t *testing.T) {
			got := summary(fixture(t, name))
			golden.Compare(t, filepath.Join("testdata", name+".golden"), []byte(got))
		})
	}
}

// A want is a row that the source of a fixture (testdata/source) calls for.
type want struct {
	kind            Kind
	group           string
	typ             dtype.DType
	operand, result int64
	count           int64
	async           bool
}

// The figures are worked out from the sources, not from what Read gave.
var wantCollectives = map[string][]want{
	// loop.mlir: 6 layers. A layer gathers a shard of 128×1024 over 8 replicas and scatters a
	// gradient of 1024×1024. XLA:CPU has no bf16 collectives and widens both to f32, 4 bytes:
	// 128·1024·4 = 524288 and 1024·1024·4 = 4194304. One loop, so one row each, 6 times.
	"cpu_loop": {
		{AllGather, "1 group of 8", dtype.F32, 524288, 4194304, 6, false},
		{ReduceScatter, "1 group of 8", dtype.F32, 4194304, 524288, 6, false},
	},
	// The same source for B200 stays bf16, half the bytes: 262144 and 2097152. Both collectives
	// are pipelined. The gather of layer i+1 starts in layer i: layer 0's gather stands before
	// the loop. The scatter of layer i-1 ends in layer i: layer 5's stands after it. A loop of 6
	// that gives up its first and its last iteration keeps 4. Before the loop: the gathers of
	// layers 0 and 1, combined into one instruction of two operands. In the loop, 4 each. After
	// it: two scatters. Sums: 2+4 = 6 gathers and 4+2 = 6 scatters, as the source asks.
	"b200_pipelined": {
		{AllGather, "1 group of 8", dtype.BF16, 262144, 2097152, 1, true},
		{AllGather, "1 group of 8", dtype.BF16, 262144, 2097152, 1, true},
		{ReduceScatter, "1 group of 8", dtype.BF16, 2097152, 262144, 4, true},
		{AllGather, "1 group of 8", dtype.BF16, 262144, 2097152, 4, true},
		{ReduceScatter, "1 group of 8", dtype.BF16, 2097152, 262144, 1, true},
		{ReduceScatter, "1 group of 8", dtype.BF16, 2097152, 262144, 1, true},
	},
	// combined.mlir: sums of 256×256, 128 and 64×32 f32 in two groups of 4, which are one
	// all-reduce of three operands on CPU: 262144, 512 and 8192 bytes.
	"cpu_combined": {
		{AllReduce, "2 groups of 4", dtype.F32, 262144, 262144, 1, false},
		{AllReduce, "2 groups of 4", dtype.F32, 512, 512, 1, false},
		{AllReduce, "2 groups of 4", dtype.F32, 8192, 8192, 1, false},
	},
	// XLA:GPU joins the three into one array first: 262144+512+8192 = 270848. There is nothing
	// to do meanwhile, so it is synchronous.
	"b200_combined": {
		{AllReduce, "2 groups of 4", dtype.F32, 270848, 270848, 1, false},
	},
	// exchange.mlir: a ring of 8 passes on 256×64 f32 = 65536 bytes; pairs four apart exchange
	// 128×64 f32 = 32768 bytes. XLA:CPU splits the latter into a slice for each peer; it is still
	// one exchange. Neither depends on the other, and each compiler has its own order.
	"cpu_exchange": {
		{CollectivePermute, "8 pairs", dtype.F32, 65536, 65536, 1, false},
		{AllToAll, "4 groups of 2, stride 4", dtype.F32, 32768, 32768, 1, false},
	},
	"b200_exchange": {
		{AllToAll, "4 groups of 2, stride 4", dtype.F32, 32768, 32768, 1, false},
		{CollectivePermute, "8 pairs", dtype.F32, 65536, 65536, 1, false},
	},
	// branch.mlir: a sum of 1024 f32 = 4096 bytes in a loop that ends when the data says so, so
	// counted once; then a gather by neighbours, 4096 to 8192 bytes, if a flag is set.
	"cpu_branch": {
		{AllReduce, "1 group of 8", dtype.F32, 4096, 4096, 1, false},
		{AllGather, "4 groups of 2", dtype.F32, 4096, 8192, 1, false},
	},
	// For B200 the sum is small enough for a kernel of XLA's own: it is inside a fusion inside an
	// asynchronous call.
	"b200_branch": {
		{AllReduce, "1 group of 8", dtype.F32, 4096, 4096, 1, true},
		{AllGather, "4 groups of 2", dtype.F32, 4096, 8192, 1, false},
	},
	// mxfp8.mlir: one sum of 4096×16384 bf16 = 134217728 bytes over all replicas.
	"b200_mxfp8_8": {
		{AllReduce, "1 group of 8", dtype.BF16, 134217728, 134217728, 1, false},
	},
	"b200_mxfp8_1024": {
		{AllReduce, "1 group of 1024", dtype.BF16, 134217728, 134217728, 1, false},
	},
	// These have none.
	"b200_attention": nil, "b200_attention_plan": nil, "b200_nvfp4": nil,
}

func TestCollectivesAreThoseOfTheSource(t *testing.T) {
	for _, name := range fixtureNames(t) {
		want, ok := wantCollectives[name]
		if !ok {
			t.Errorf("nobody said what %s must hold", name)
		}
		rows := fixture(t, name).Collectives()
		if len(rows) != len(want) {
			t.Errorf("%s: %d rows, want %d", name, len(rows), len(want))
			continue
		}
		for i, w := range want {
			if got := rowOf(rows[i]); got != w {
				t.Errorf("%s row %d:\n got %+v\nwant %+v", name, i, got, w)
			}
		}
	}
}

func rowOf(c Collective) want {
	return want{c.Kind, c.Group.String(), c.Type, c.OperandBytes, c.ResultBytes, c.Count, c.Async}
}

func TestLoopsAndBranchesAreMarked(t *testing.T) {
	for _, name := range []string{"cpu_branch", "b200_branch"} {
		rows := fixture(t, name).Collectives()
		if sum := rows[0]; !sum.TripUnknown || sum.Branch {
			t.Errorf("the sum is in a loop without trip count, not in a branch: %+v", sum)
		}
		if gather := rows[1]; gather.TripUnknown || !gather.Branch {
			t.Errorf("the gather is in a branch, not in a loop: %+v", gather)
		}
	}
	for _, c := range fixture(t, "cpu_loop").Collectives() {
		if c.TripUnknown || c.Branch {
			t.Errorf("the trip count 6 is known: %+v", c)
		}
	}
}

func TestPipelinedRowsNameTheirPlace(t *testing.T) {
	var gathers int64
	for _, c := range fixture(t, "b200_pipelined").Collectives() {
		if c.Kind == AllGather {
			gathers += c.Count
			if !c.Pipelined || c.OpName != "layer/gather" || strings.HasPrefix(c.In, "async") {
				t.Errorf("gather without its place: %+v", c)
			}
		}
	}
	if gathers != 6 {
		t.Errorf("%d gathers for 6 layers", gathers)
	}
}

// The sum is three computations deep; its place is the loop's body.
func TestFusedCollectiveNamesItsPlace(t *testing.T) {
	sum := fixture(t, "b200_branch").Collectives()[0]
	if sum.In != "region_0.2" || sum.Name != "fusion-start" {
		t.Errorf("the sum is in %s/%s", sum.In, sum.Name)
	}
}

func TestCustomCallsAreThoseOfTheSource(t *testing.T) {
	type call struct {
		target    string
		count     int64
		workspace int64
		plan      Plan
	}
	// The source of loop has two GEMMs a layer. Peeling leaves 1 + 4 + 1 layers; cuBLAS is
	// given 4 MiB of workspace each time, its default in XLA. The attention's plan is the same
	// program compiled with cuDNN 9.24.1 at hand: its backward asks for 269484160 bytes.
	gemm, gemms := call{"__cublas$lt$matmul", 1, 4 << 20, PlanUnknown},
		call{"__cublas$lt$matmul", 4, 4 << 20, PlanUnknown}
	tests := map[string][]call{
		"b200_pipelined": {gemm, gemm, gemms, gemms, gemm, gemm},
		"b200_mxfp8_8":   {{"__cudnn$blockScaledDot", 1, 0, PlanUnknown}},
		"b200_nvfp4":     {{"__cudnn$blockScaledDot", 1, 0, PlanUnknown}},
		"b200_attention": {
			{"__cudnn$fmhaSoftmax", 1, 0, PlanMissing},
			{"__cudnn$fmhaSoftmaxBackward", 1, 0, PlanMissing},
		},
		"b200_attention_plan": {
			{"__cudnn$fmhaSoftmax", 1, 0, PlanCompiled},
			{"__cudnn$fmhaSoftmaxBackward", 1, 269484160, PlanCompiled},
		},
		"cpu_loop": nil,
	}
	for name, want := range tests {
		var got []call
		for _, c := range fixture(t, name).CustomCalls() {
			got = append(got, call{c.Target, c.Count, c.Workspace, c.Plan})
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(call{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// PJRT's memory statistics of the same compiles; a tuple adds 8 bytes for each of its pointers
// to the output on both platforms, which are no tensors.
func TestBytesAgreeWithMemoryStatistics(t *testing.T) {
	for _, test := range []struct {
		name                    string
		argument, output, alias int64
		tuple                   int
	}{
		{"cpu_loop", 4194304, 2621456, 1572864, 2},
		{"cpu_combined", 270848, 270872, 0, 3},
		{"cpu_branch", 4101, 8208, 4096, 2},
		{"b200_branch", 4101, 8208, 4096, 2},
		{"b200_pipelined", 4194304, 2621456, 1572864, 2},
		{"b200_mxfp8_8", 86507520, 134217728, 0, 0},
		{"b200_nvfp4", 1474560, 2097152, 0, 0}, // 4-bit elements, two to a byte
		{"b200_attention", 167772160, 167772192, 0, 4},
	} {
		m := fixture(t, test.name)
		var argument, alias int64
		output := int64(8 * test.tuple)
		for _, p := range m.Params {
			argument += p.Bytes
		}
		for _, r := range m.Results {
			output += r.Bytes
		}
		for _, a := range m.Aliases {
			alias += m.Results[a.Result].Bytes
		}
		if argument != test.argument || output != test.output || alias != test.alias {
			t.Errorf("%s: argument %d, output %d, alias %d; want %d, %d, %d", test.name,
				argument, output, alias, test.argument, test.output, test.alias)
		}
	}
}

func TestOpsMultiplyLoops(t *testing.T) {
	ops := map[string]int64{}
	for _, o := range fixture(t, "cpu_loop").ops() {
		ops[o.opcode] = o.count
	}
	// Two GEMMs and one tanh a layer; the condition is compared once more to end the loop.
	for op, want := range map[string]int64{"dot": 12, "tanh": 6, "while": 1, "compare": 7} {
		if ops[op] != want {
			t.Errorf("%s runs %d times, want %d", op, ops[op], want)
		}
	}
}

func ExampleModule_Collectives() {
	code, err := os.ReadFile("testdata/cpu_loop.hlo")
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := Read("hlo_with_config", code)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range m.Collectives() {
		fmt.Printf("%d × %s of %s over %s\n", c.Count, c.Kind, c.Shape, c.Group)
	}
	// Output:
	// 6 × all-gather of f32[128,1024] over 1 group of 8
	// 6 × reduce-scatter of f32[1024,1024] over 1 group of 8
}

// An opCount is how often instructions of one opcode run in one run of the program.
type opCount struct {
	opcode string
	count  int64
}

// ops counts the instructions that the program reaches, by opcode.
func (m *Module) ops() (list []opCount) {
	counts := map[string]int64{}
	for _, c := range m.schedule.program.computations {
		for _, i := range c.list {
			if c.visited == done {
				counts[i.opcode] = satAdd(counts[i.opcode], c.runs)
			}
		}
	}
	for _, op := range slices.Sorted(maps.Keys(counts)) {
		list = append(list, opCount{op, counts[op]})
	}
	return list
}

// Command kernels compiles our own kernels for each target without a GPU and lists what ptxas made
// of them: registers, spills, shared memory, instructions per element, and the instructions of
// tensor cores. With -o it writes the table that a test holds the kernels to.
package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/program"
)

func main() {
	targets := flag.String("targets", "b200,gb300,rtx6000pro", "GPUs to compile for")
	out := flag.String("o", "", "file to write the table to")
	only := flag.String("only", "", "what the names of kernels begin with")
	flag.Parse()
	rows, err := measure(context.Background(), strings.Split(*targets, ","), *only)
	if err == nil {
		fmt.Print(string(table(rows)))
		if *out != "" {
			err = os.WriteFile(*out, table(rows), 0o666)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernels:", err)
		os.Exit(1)
	}
}

// A kernel is printed for a target, in the shape of a Llama 70B layer or of DeepSeek-V3's experts.
type kernel struct {
	name     string
	elements int // of its results, that instructions are counted by; 0 where there are loops
	print    func(gpu string) (*triton.Kernel, error)
}

// rows and cols are the matrix that element kernels read.
const rows, cols = 8192, 8192

// both is the form of what GEMMs read at once.
var both = fused.Form{Along: true, Across: true, Swizzled: true}

// stochastic are the kernels of gradients in NVFP4, one way and both, and of weights.
func stochastic() (list []kernel) {
	add := func(name string, s fused.Source, f fused.NVFP4Form) {
		list = append(list, kernel{name, rows * cols * s.Parts,
			func(gpu string) (*triton.Kernel, error) {
				f.Added, f.Tensors = gpu == "rtx6000pro", [][2]int{{0, 1}, {2, 3}}[:s.Parts]
				return fused.NVFP4(fused.Matrix{Rows: rows, Cols: cols}, s, f)
			}})
	}
	for _, s := range fused.Sources() {
		stochastic := [2]bool{true, true}
		switch s.Name {
		case "quantize":
			add("quantize nvfp4 tiles", s, fused.NVFP4Form{Form: both, Tile: true})
			add("quantize nvfp4 rows", s, fused.NVFP4Form{Form: fused.Form{Along: true, Swizzled: true}})
			add("quantize nvfp4 stochastic rows", s,
				fused.NVFP4Form{Form: fused.Form{Along: true, Swizzled: true}, Stochastic: stochastic})
			add("quantize nvfp4 stochastic columns", s,
				fused.NVFP4Form{Form: fused.Form{Across: true, Swizzled: true}, Stochastic: stochastic})
			add("quantize nvfp4 stochastic", s, fused.NVFP4Form{Form: both, Stochastic: stochastic})
		case "swiglu_grad", "gelu_grad":
			add(s.Name+" nvfp4 stochastic", s, fused.NVFP4Form{Form: both, Stochastic: stochastic})
		}
	}
	return list
}

// inLoops are the forms that kernels have in the loop over layers: activations are read from and
// written into stacks, and gradients of residuals are kept.
func inLoops() (list []kernel) {
	const rounds = 80
	stochastic := fused.NVFP4Form{Stochastic: [2]bool{true, true}, Tensors: [][2]int{{0, 1}, {2, 3}}}
	for _, row := range []struct {
		name, source string
		form         fused.Form
		print        func(fused.Matrix, fused.Source, fused.Form, string) (*triton.Kernel, error)
	}{
		{"rms_norm mxfp8 saved", "rms_norm", fused.Form{Stacks: fused.Stacks{Rounds: rounds,
			Into: []int{2, 3}, Saved: []int{0}}}, mxfp8},
		{"swiglu mxfp8 saved", "swiglu", fused.Form{Stacks: fused.Stacks{Rounds: rounds,
			Into: []int{2, 3}, Saved: []int{0, 1}}}, mxfp8},
		{"swiglu_grad mxfp8 from stacks", "swiglu_grad", fused.Form{Stacks: fused.Stacks{
			Rounds: rounds, From: []int{1, 2}}}, mxfp8},
		{"rms_norm_grad mxfp8 kept", "rms_norm_grad", fused.Form{Keep: true,
			Stacks: fused.Stacks{Rounds: rounds, From: []int{3}}}, mxfp8},
		{"rms_norm nvfp4 saved", "rms_norm", fused.Form{Stacks: fused.Stacks{Rounds: rounds,
			Into: []int{2, 3}, Saved: []int{0}}}, nvfp4(fused.NVFP4Form{})},
		{"swiglu amax saved", "swiglu", fused.Form{Keep: true, Stacks: fused.Stacks{
			Rounds: rounds, Saved: []int{0, 1}}}, amax},
		{"swiglu_grad amax from stacks", "swiglu_grad", fused.Form{Stacks: fused.Stacks{
			Rounds: rounds, From: []int{1, 2}}}, amax},
		{"swiglu_grad nvfp4 from stacks", "swiglu_grad", fused.Form{Stacks: fused.Stacks{
			Rounds: rounds, From: []int{1, 2}}}, nvfp4(stochastic)},
		{"rms_norm_grad amax kept", "rms_norm_grad", fused.Form{Keep: true,
			Stacks: fused.Stacks{Rounds: rounds, From: []int{3}}}, amax},
		{"swiglu requantized with its gradients", requantized, fused.Form{Columns: []int{0},
			Stacks: fused.Stacks{Rounds: rounds, From: []int{0, 1}}}, mxfp8},
		{"geglu requantized with its gradients", geglu, fused.Form{Columns: []int{0},
			Stacks: fused.Stacks{Rounds: rounds, From: []int{0, 1}}}, mxfp8},
	} {
		list = append(list, kernel{row.name, rows * cols, func(gpu string) (*triton.Kernel, error) {
			s, err := find(row.source)
			if err != nil {
				return nil, err
			}
			row.form.Along, row.form.Across = true, true
			return row.print(fused.Matrix{Rows: rows, Cols: cols}, s, row.form, gpu)
		}})
	}
	return list
}

// SwiGLU and its gradients, and GeGLU's, of gate, up and the gradient of the product.
const (
	requantized = "bf16, bf16, bf16; sigmoid 0; mul 0 3; mul 4 1; mul 2 1; mul 6 3; mul 6 0; " +
		"mul 3 3; sub 3 9; mul 8 10; add 7 11; mul 2 4 -> 5 12 13"
	geglu = "bf16, bf16, bf16; mul 0 0; scale 3 0.044715; shift 4 1; mul 0 5; " +
		"scale 6 1.5957691216057308; sigmoid 7; mul 0 8; mul 9 1; mul 2 9; mul 2 1; mul 12 8; " +
		"mul 12 0; mul 8 8; sub 8 15; mul 14 16; scale 17 1.5957691216057308; mul 18 5; add 13 19; " +
		"mul 18 0; scale 21 0.044715; mul 22 0; add 20 23; mul 22 0; add 24 25 -> 10 11 26"
)

// find gives a source by its name or its expression.
func find(text string) (fused.Source, error) {
	if !strings.Contains(text, " -> ") {
		return fused.Find(text)
	}
	e, err := expr.Parse(text)
	if err != nil {
		return fused.Source{}, err
	}
	return fused.Of(e), nil
}

func mxfp8(m fused.Matrix, s fused.Source, f fused.Form, _ string) (*triton.Kernel, error) {
	return fused.MXFP8(m, s, f)
}

func amax(m fused.Matrix, s fused.Source, f fused.Form, _ string) (*triton.Kernel, error) {
	return fused.Amax(m, s, f)
}

// nvfp4 quantizes as another form says.
func nvfp4(like fused.NVFP4Form) func(fused.Matrix, fused.Source, fused.Form,
	string) (*triton.Kernel, error) {
	return func(m fused.Matrix, s fused.Source, f fused.Form, gpu string) (*triton.Kernel, error) {
		like.Form, like.Added = f, gpu == "rtx6000pro"
		return fused.NVFP4(m, s, like)
	}
}

// kernels are all that are measured.
func kernels() (list []kernel) {
	for _, s := range fused.Sources() {
		list = append(list, kernel{s.Name + " mxfp8", rows * cols * s.Parts,
			func(string) (*triton.Kernel, error) {
				return fused.MXFP8(fused.Matrix{Rows: rows, Cols: cols}, s, both)
			}})
		list = append(list, kernel{s.Name + " nvfp4", rows * cols * s.Parts,
			func(string) (*triton.Kernel, error) {
				return fused.NVFP4(fused.Matrix{Rows: rows, Cols: cols}, s, fused.NVFP4Form{Form: both})
			}})
		list = append(list, kernel{s.Name + " amax", rows * cols * s.Parts,
			func(string) (*triton.Kernel, error) {
				return fused.Amax(fused.Matrix{Rows: rows, Cols: cols}, s, both)
			}})
	}
	list = append(list, inLoops()...)
	list = append(list, stochastic()...)
	list = append(list, norms()...)
	list = append(list,
		kernel{"loss", 0,
			func(string) (*triton.Kernel, error) { return fused.Loss{Rows: rows, Cols: 128256}.Kernel() }})
	return append(append(list, grouped()...), attention()...)
}

// attention are the kernels of Gemma 2's heads, with their soft cap, and of heads that cuDNN has no
// call for: DeepSeek-V3's on rtx6000pro, and others.
func attention() (list []kernel) {
	for _, c := range []struct {
		name string
		a    flash.Attention
	}{
		{"softcap 256", flash.Attention{Heads: 16, KVHeads: 8, Head: 256, Value: 256, SoftCap: 50}},
		{"softcap 128 window", flash.Attention{Heads: 32, KVHeads: 16, Head: 128, Value: 128,
			SoftCap: 50, Window: 4096}},
		{"softcap 256 documents", flash.Attention{Heads: 16, KVHeads: 8, Head: 256, Value: 256,
			SoftCap: 50, Window: 4096, Documents: true}},
		{"256", flash.Attention{Heads: 16, KVHeads: 16, Head: 256, Value: 256}},
		{"192 values 128", flash.Attention{Heads: 128, KVHeads: 128, Head: 192, Value: 128}},
		{"160", flash.Attention{Heads: 32, KVHeads: 8, Head: 160, Value: 160}},
		{"20", flash.Attention{Heads: 12, KVHeads: 12, Head: 20, Value: 20}},
		{"192 values 128 documents masked", flash.Attention{Seq: 8191, Heads: 128, KVHeads: 128,
			Head: 192, Value: 128, Documents: true}},
		{"softcap 8 documents masked", flash.Attention{Seq: 8191, Heads: 32, KVHeads: 8, Head: 8,
			Value: 8, SoftCap: 50, Documents: true}},
		{"softcap 40 documents masked", flash.Attention{Seq: 8191, Heads: 32, KVHeads: 8, Head: 40,
			Value: 40, SoftCap: 50, Documents: true}},
		{"softcap 64 documents masked", flash.Attention{Seq: 8191, Heads: 32, KVHeads: 8, Head: 64,
			Value: 64, SoftCap: 50, Documents: true}},
		{"softcap 72 documents masked", flash.Attention{Seq: 8191, Heads: 32, KVHeads: 8, Head: 72,
			Value: 72, SoftCap: 50, Documents: true}},
		{"softcap 96 documents masked", flash.Attention{Seq: 8191, Heads: 32, KVHeads: 8, Head: 96,
			Value: 96, SoftCap: 50, Documents: true}},
		{"softcap 144 documents masked", flash.Attention{Seq: 8191, Heads: 32, KVHeads: 8, Head: 144,
			Value: 144, SoftCap: 50, Window: 4096, Documents: true}},
	} {
		for _, part := range []flash.Part{flash.Forward, flash.DQ, flash.DKV} {
			a := c.a
			a.Part, a.Batch, a.Seq, a.Causal = part, 1, cmp.Or(a.Seq, 8192), true
			a.Keys = a.Seq
			a.Scale = 1 / math.Sqrt(float64(a.Head))
			list = append(list, kernel{fmt.Sprintf("attention %s %s", part, c.name), 0,
				func(gpu string) (*triton.Kernel, error) {
					a.Small = gpu == "rtx6000pro"
					return a.Kernel()
				}})
		}
	}
	return list
}

// norms are norms of rows and their gradients: alone, in a loop over layers, of rows as long as
// they can be, and of heads.
func norms() (list []kernel) {
	for _, row := range []struct{ name, spec string }{
		{"residual norm", "rms_norm 8192x8192 eps=1e-05 shift=0 added normed"},
		{"residual norm saved",
			"rms_norm 8192x8192 eps=1e-05 shift=0 added normed rounds=80 from=1 saved=0 kept=0,1"},
		{"residual norm widest", "rms_norm 8192x16384 eps=1e-05 shift=0 added normed"},
		{"residual norm stats", "rms_norm 8192x8192 eps=1e-05 shift=0 added stats"},
		{"residual norm codes",
			"rms_norm 8192x8192 eps=1e-05 shift=0 added codes stats rounds=80 into=0"},
		{"norm codes widest", "rms_norm 8192x16384 eps=1e-05 shift=0 codes stats rounds=80 saved=0"},
		{"norm of heads", "rms_norm 65536x128 eps=1e-05 shift=0 normed"},
		{"rms_norm grad", "rms_norm_grad 8192x8192 eps=1e-05 shift=0 grads=1"},
		{"rms_norm grad of sums",
			"rms_norm_grad 8192x8192 eps=1e-05 shift=0 grads=3 residual rounds=80 from=0"},
		{"rms_norm grad masked", "rms_norm_grad 8191x7168 eps=1e-05 shift=1 grads=3 residual"},
		{"rms_norm grad of heads", "rms_norm_grad 65536x128 eps=1e-05 shift=0 grads=1"},
	} {
		list = append(list, kernel{row.name, 0, func(string) (*triton.Kernel, error) {
			n, err := rownorm.Parse(row.spec)
			if err != nil {
				return nil, err
			}
			return n.Kernel()
		}})
	}
	return list
}

// grouped are the GEMMs of experts, with weights as they are and as FSDP gathers them: along what
// is kept (oek), or along what is summed over (keo; of NVFP4, whose numbers are packed along it, in
// shards). Gradients are written as they are reduced.
func grouped() (list []kernel) {
	for _, f := range []dtype.Format{"", dtype.MXFP8, dtype.NVFP4} {
		for _, order := range []string{"eok", "oek", "keo"} {
			for _, grad := range []bool{false, true} {
				g := fused.Group{Rows: 16384, Out: 4096, In: 7168, Experts: 8, Format: f, Weights: order,
					Grad: grad}
				if grad && order == "keo" {
					continue // there is no such kernel
				}
				as := order
				if f == dtype.NVFP4 && order == "keo" {
					g.Weights, g.Shards, as = "eok", 4, "shards"
				}
				name := "grouped "
				if grad {
					name += "dw "
				}
				name += cmp.Or(string(f), "bf16")
				if as != "eok" {
					name += " " + as
				}
				list = append(list, kernel{name, 0, func(gpu string) (*triton.Kernel, error) {
					g.Small = gpu == "rtx6000pro"
					return g.Kernel()
				}})
			}
		}
	}
	return list
}

// A row is what became of a kernel on a target.
type row struct {
	kernel, target    string
	registers, spills int // spills in bytes
	shared            int // bytes
	perElement        float64
	tensorCores       string // their instructions
}

var header = []string{"kernel", "target", "registers", "spill bytes", "shared bytes",
	"instructions per element", "tensor cores"}

func (r row) fields() []string {
	return []string{r.kernel, r.target, strconv.Itoa(r.registers), strconv.Itoa(r.spills),
		strconv.Itoa(r.shared), fmt.Sprintf("%.1f", r.perElement), r.tensorCores}
}

// table prints rows as CSV.
func table(rows []row) []byte {
	var b bytes.Buffer
	t := csv.NewWriter(&b)
	_ = t.Write(header)
	for _, r := range rows {
		_ = t.Write(r.fields())
	}
	t.Flush()
	return b.Bytes()
}

// measure compiles kernels, whose names begin with only, for all targets.
func measure(ctx context.Context, targets []string, only string) (rows []row, err error) {
	c, err := engine.OpenCompiler(ctx, engine.Options{WithoutCuDNN: true})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	dir, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		return nil, err
	}
	bundle, err := plugin.Open(ctx, dir, "cuda13")
	if err != nil {
		return nil, err
	}
	ptxas := filepath.Join(bundle.DataDir, "bin", "ptxas")
	for _, k := range kernels() {
		if !strings.HasPrefix(k.name, only) {
			continue
		}
		for _, gpu := range targets {
			r, err := compile(ctx, c, ptxas, k, gpu)
			if err != nil {
				return nil, fmt.Errorf("%s for %s: %w", k.name, gpu, err)
			}
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// compile lets XLA compile a kernel and dump its PTX, and asks ptxas about it.
func compile(ctx context.Context, c *engine.Compiler, ptxas string, k kernel,
	gpu string) (r row, err error) {
	text, err := k.print(gpu)
	if err != nil {
		return r, err
	}
	cluster, err := machine.ParseCluster("1x" + gpu)
	if err != nil {
		return r, err
	}
	dir, err := os.MkdirTemp("", "kernels")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	m := &program.FromText(text.Name, text.Module(), 1).Modules[0]
	m.Flags = map[string]any{"xla_dump_to": dir, "xla_dump_emitter_re": "ptx"}
	if _, err := c.Compile(ctx, m, cluster); err != nil {
		return r, err
	}
	found, err := filepath.Glob(filepath.Join(dir, "*.ptx"))
	if err != nil || len(found) != 1 {
		return r, fmt.Errorf("%d PTX files", len(found))
	}
	ptx, err := os.ReadFile(found[0])
	if err != nil {
		return r, err
	}
	r = row{kernel: k.name, target: gpu, tensorCores: tensorCores(string(ptx))}
	cubin := filepath.Join(dir, "kernel.cubin")
	said, err := exec.CommandContext(ctx, ptxas, "-v", "--gpu-name", target(string(ptx)), found[0],
		"-o", cubin).CombinedOutput()
	if err != nil {
		return r, fmt.Errorf("ptxas: %w\n%s", err, said)
	}
	r.registers = number(said, `Used (\d+) registers`)
	r.spills = number(said, `(\d+) bytes spill stores`) + number(said, `(\d+) bytes spill loads`)
	if r.shared, err = launched(dir); err != nil {
		return r, err
	}
	n, err := instructions(cubin, text.Name)
	if k.elements > 0 {
		programs := text.Grid[0] * text.Grid[1] * text.Grid[2]
		r.perElement = float64(n*text.Warps*32*programs) / float64(k.elements)
	}
	return r, err
}

// launched is the shared memory that XLA launches the kernel with, by its list of thunks.
func launched(dir string) (int, error) {
	found, err := filepath.Glob(filepath.Join(dir, "*thunk_sequence.txt"))
	if err != nil || len(found) != 1 {
		return 0, fmt.Errorf("%d lists of thunks", len(found))
	}
	text, err := os.ReadFile(found[0])
	return number(text, `shared_memory: (\d+) bytes`), err
}

// target is the architecture that PTX is for.
func target(ptx string) string {
	return regexp.MustCompile(`\.target (\w+)`).FindStringSubmatch(ptx)[1]
}

func number(text []byte, pattern string) int {
	m := regexp.MustCompile(pattern).FindSubmatch(text)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(string(m[1]))
	return n
}

// mma finds GEMMs on tensor cores, copies of scales to tensor memory, and copies of blocks by TMA.
var mma = regexp.MustCompile(`(?m)^\s*(?:@\S+ )?` +
	`(tcgen05\.mma|tcgen05\.cp|mma\.sync|cp\.async\.bulk\.tensor)` +
	`\S*?(kind::[\w.:]+|kind::\w+|\.f32\.\w+\.\w+\.f32\S*|\.\dd\.\w+|\s)`)

// tensorCores lists the instructions of tensor cores and of their copies, each once.
func tensorCores(ptx string) string {
	var list []string
	for _, m := range mma.FindAllStringSubmatch(ptx, -1) {
		name := strings.TrimSpace(m[1] + " " + strings.Trim(m[2], ". "))
		if !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	return strings.Join(list, "; ")
}

// instructions counts what a program executes if it has no loop: each is 16 bytes long.
func instructions(cubin, name string) (int, error) {
	f, err := elf.Open(cubin)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	s := f.Section(".text." + name)
	if s == nil {
		return 0, fmt.Errorf("the cubin has no section .text.%s", name)
	}
	return int(s.Size / 16), nil
}

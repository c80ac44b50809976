package triton

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// A Launch is how many programs run a kernel, and with how many threads each.
type Launch struct {
	Grid   [3]int // programs along x, y and z; 0 is 1
	Warps  int    // of 32 threads
	Stages int    // of loops whose loads are started ahead; 0 is 1
}

// A Kernel is a finished text. Equal kernels have equal texts, which XLA compiles once.
type Kernel struct {
	Name string
	Text string // the module, one line per operation
	Args []Arg
	Spec string // what it computes, for readers of the program
	Launch
	scratch int // bytes for the descriptors of all programs
}

// Kernel ends the text.
func (b *Builder) Kernel(l Launch) (*Kernel, error) {
	if b.err != nil {
		return nil, b.err
	}
	for i, n := range l.Grid {
		l.Grid[i] = max(n, 1)
	}
	if !Launches(l.Grid) {
		return nil, fmt.Errorf("kernel %s: a grid of %v programs", b.name, l.Grid)
	}
	programs := l.Grid[0] * l.Grid[1] * l.Grid[2]
	if b.scratch > 0 && programs > math.MaxInt32/b.scratch {
		return nil, fmt.Errorf("kernel %s: descriptors of %v programs", b.name, l.Grid)
	}
	l.Stages = max(l.Stages, 1)
	params := make([]string, len(b.args))
	for i, a := range b.args {
		params[i] = fmt.Sprintf("%%%s: %s {tt.divisibility = 16 : i32}", a.Name, spell(a.Elem, true, nil))
	}
	text := "module {\n  tt.func public @" + b.name + "(" + join(params) +
		") attributes {noinline = false} {\n" + b.constants.String() + b.body.String() +
		"    tt.return\n  }\n}\n"
	return &Kernel{Name: b.name, Text: text, Args: b.args, Launch: l,
		scratch: b.scratch * programs}, nil
}

// Launches tells whether a GPU can run a grid: up to 2³¹−1 programs along x, and 65,535 along y and
// z (CUDA C++ Programming Guide, technical specifications).
func Launches(grid [3]int) bool {
	return grid[0] <= math.MaxInt32 && max(grid[1], grid[2]) <= math.MaxUint16
}

// Scratch is the bytes of memory that the call needs for descriptors: its last result.
func (k *Kernel) Scratch() int { return k.scratch }

// Config is the backend_config of the kernel's call in StableHLO.
func (k *Kernel) Config() string {
	quoted := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(k.Text)
	more := ""
	if k.Spec != "" {
		more = fmt.Sprintf(", spec = %q", k.Spec)
	}
	if k.scratch > 0 {
		more += fmt.Sprintf(", is_tma_allowed = true, global_scratch_memory_size = %d : i32", k.scratch)
	}
	return fmt.Sprintf(`{name = "%s", ir = "%s", num_stages = %d : i32, num_warps = %d : i32, `+
		`grid_x = %d : i32, grid_y = %d : i32, grid_z = %d : i32, debug = false%s}`, k.Name, quoted,
		k.Stages, k.Warps, k.Grid[0], k.Grid[1], k.Grid[2], more)
}

// Aliases are the attribute of the call that says which results take the memory of operands; "" if
// none does.
func (k *Kernel) Aliases() string {
	var list []string
	results := 0
	for _, a := range k.Args {
		if a.Result {
			results++
		}
	}
	n := 0
	for _, a := range k.Args {
		if !a.Result {
			continue
		}
		at := slices.IndexFunc(k.Args, func(o Arg) bool { return !o.Result && o.Name == a.InPlace })
		if at >= 0 && a.InPlace != "" {
			place := fmt.Sprint(n)
			if results == 1 && k.scratch == 0 {
				place = ""
			}
			list = append(list, fmt.Sprintf("#stablehlo.output_operand_alias<output_tuple_indices = [%s], "+
				"operand_index = %d, operand_tuple_indices = []>", place, at))
		}
		n++
	}
	if len(list) == 0 {
		return ""
	}
	return ", output_operand_aliases = [" + join(list) + "]"
}

// Module is a StableHLO module that calls the kernel and nothing else.
func (k *Kernel) Module() string {
	var params, operands, types, results, layoutsIn, layoutsOut []string
	for i, a := range k.Args {
		t := spell(a.Elem, false, a.Shape)
		order := make([]string, len(a.Shape))
		for d := range order {
			order[d] = fmt.Sprint(len(order) - 1 - d)
		}
		layout := fmt.Sprintf("dense<[%s]> : tensor<%dxindex>", join(order), len(order))
		if a.Result {
			results, layoutsOut = append(results, t), append(layoutsOut, layout)
			continue
		}
		name := fmt.Sprintf("%%a%d", i)
		params = append(params, name+": "+t)
		operands, types = append(operands, name), append(types, t)
		layoutsIn = append(layoutsIn, layout)
	}
	visible := len(results)
	if k.scratch > 0 {
		results = append(results, fmt.Sprintf("tensor<%dxui8>", k.scratch))
		layoutsOut = append(layoutsOut, "dense<0> : tensor<1xindex>")
	}
	names := make([]string, visible)
	for i := range names {
		if names[i] = fmt.Sprintf("%%r#%d", i); len(results) == 1 {
			names[i] = "%r"
		}
	}
	head := "%r"
	if len(results) > 1 {
		head = fmt.Sprintf("%%r:%d", len(results))
	}
	var s strings.Builder
	fmt.Fprintf(&s, "module @%s {\n  func.func @main(%s) -> (%s) {\n", k.Name, join(params),
		join(results[:visible]))
	fmt.Fprintf(&s, "    %s = stablehlo.custom_call @__gpu$xla.gpu.triton(%s) "+
		"{api_version = 4 : i32,\n      backend_config = %s,\n", head, join(operands), k.Config())
	fmt.Fprintf(&s, "      operand_layouts = [%s], result_layouts = [%s]%s}\n", join(layoutsIn),
		join(layoutsOut), k.Aliases())
	fmt.Fprintf(&s, "      : (%s) -> (%s)\n    return %s : %s\n  }\n}\n", join(types), join(results),
		join(names), join(results[:visible]))
	return s.String()
}

package pt2

import "github.com/deepwell/deepwell/dtype"

// A Program is what torch.export recorded of one call of a module.
type Program struct {
	Graph *Graph
	// Inputs are in the order of Graph.Inputs, Outputs in the order of Graph.Outputs.
	Inputs, Outputs []Spec
	// Ranges bounds the symbols of sizes, such as s72.
	Ranges map[string]Range
	Torch  string   // the release that wrote the file, such as 2.15.0+cu132
	Schema [2]int64 // of the file: major and minor
}

// A Graph is a list of nodes in an order in which they can run. Names of values are unique within
// the graph; a graph that is an argument of a node sees only its own.
type Graph struct {
	Name            string // of a graph that is an argument, such as submod_1
	Inputs, Outputs []Argument
	Nodes           []Node
	Values          map[string]Value
}

// A Node is one call of an operator.
type Node struct {
	Name    string // "" before torch 2.10
	Target  string // the overload, such as aten.linear.default or higher_order.cond
	Args    []Arg
	Outputs []Ref    // lists are flattened; "" for None
	Modules []Module // where the call stands, outermost first; none for nodes of the exporter's own
	Source  string   // model.py:12, the innermost line outside torch; "" where not recorded
}

// Arg finds an argument by the name that the operator's schema gives it. Arguments that equal their
// default are mostly not recorded. Arguments of higher-order operators have no names.
func (n *Node) Arg(name string) (Argument, bool) {
	for _, a := range n.Args {
		if a.Name == name && name != "" {
			return a.Value, true
		}
	}
	return nil, false
}

// An Arg is one argument of a call.
type Arg struct {
	Name    string
	Keyword bool // given by name, not by position
	Value   Argument
}

// An Argument is a value that is known when the program is read, or a reference to one that is
// not. Its dynamic type is one of
//
//	nil                    None
//	Ref, []Ref, [][]Ref    tensors; "" for None in a list of optional tensors
//	int64, []int64, [][]int64, float64, []float64, [][]float64, bool, []bool, string, []string,
//	complex128
//	Expr, []Expr           numbers that depend on sizes; a list may mix them with integers
//	dtype.DType            torch.float32
//	Word                   a device, a layout or a memory format, which the argument's name tells
//	*Graph                 a graph that a higher-order operator calls
//	map[string]Argument
//
// A symbolic number is written as the expression of it in the symbols of the inputs' sizes: nodes
// that compute sizes, such as aten.sym_size.int, need not be followed.
type Argument any

// A Ref is the name of a value of the same graph.
type Ref string

// A Word is a device (cpu, cuda:0), a layout (strided) or a memory format (contiguous, preserve).
type Word string

// A Value is what is known of a result before the program runs.
type Value struct {
	Type dtype.DType // S64, F64 or Pred for a symbolic number
	Dims []Expr
	Sym  *Expr // of a symbolic number; nil for tensors
	Grad bool  // requires_grad
}

// A Module is one level of a node's place in the tree of modules.
type Module struct {
	// Key differs between calls: the second call of a module has a key that ends in @1.
	Key   string
	Path  string // the module's name, such as model.layers.0.mlp; "" for the outermost
	Class string // such as torch.nn.modules.linear.Linear
}

// A Spec says what an input or an output of the program is.
type Spec struct {
	Kind Kind
	// Name is the full name of a parameter, buffer or constant, the name of a user's input in the
	// call, the path of a user's output in what the call returned (loss, or 0.logits), or what a
	// mutation changes.
	Name       string
	Arg        Argument // a Ref; the value of a constant input; an output may be anything
	Persistent bool     // of a buffer: it is part of the state_dict
}

// A Kind is the role of an input or output, in the words of torch.export's GraphSignature.
type Kind string

// The kinds that raw programs have. Others keep the word of the file, such as token.
const (
	Parameter      Kind = "parameter"
	Buffer         Kind = "buffer"
	TensorConstant Kind = "tensor_constant"
	UserInput      Kind = "user_input"
	ConstantInput  Kind = "constant_input"
	UserOutput     Kind = "user_output"
	BufferMutation Kind = "buffer_mutation"
)

// A Range bounds a symbol, both ends included. A missing end is the end of int64.
type Range struct{ Min, Max int64 }

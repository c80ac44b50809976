package hlo

import (
	"fmt"
	"slices"
	"strings"
)

// A Plan says whether a cuDNN plan was compiled into a program for a call of cuDNN.
type Plan uint8

// What the optimized program shows of a plan.
const (
	PlanUnknown  Plan = iota // it does not show, or the call needs none
	PlanMissing              // the call is a name only: a run fails, its workspace is not counted
	PlanCompiled             // the plan is there and its workspace is in the memory statistics
)

var planNames = []string{"unknown", "missing", "compiled"}

// String gives "unknown", "missing" or "compiled".
func (p Plan) String() string {
	if int(p) >= len(planNames) {
		p = PlanUnknown
	}
	return planNames[p]
}

// MarshalText writes the plan into JSON as String does.
func (p Plan) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (p *Plan) UnmarshalText(text []byte) error {
	i := slices.Index(planNames, string(text))
	if i < 0 {
		return fmt.Errorf("there is no plan %q", text)
	}
	*p = Plan(i)
	return nil
}

// AllocateBuffer is the target of a custom call that runs no kernel: its result is memory to which
// nothing was written.
const AllocateBuffer = "AllocateBuffer"

// A CustomCall is one call of a kernel that the compiler did not write.
type CustomCall struct {
	Target string `json:"target"` // such as __cudnn$blockScaledDot or __cublas$lt$matmul

	// Count, TripUnknown and Branch are as for a Collective.
	Count       int64 `json:"count"`
	TripUnknown bool  `json:"trip_unknown,omitzero"`
	Branch      bool  `json:"branch,omitzero"`

	// Workspace is the scratch memory of a call of cuDNN or cuBLAS, the last of its results.
	Workspace int64 `json:"workspace,omitzero"`
	Plan      Plan  `json:"plan,omitzero"`

	OperandBytes int64 `json:"operand_bytes"`
	ResultBytes  int64 `json:"result_bytes"` // the workspace is not among them

	Name   string `json:"name"`
	In     string `json:"in"`
	OpName string `json:"op_name,omitempty"`
}

// customCall gives the row of one custom call.
func (p *program) customCall(s step) (CustomCall, error) {
	c := CustomCall{
		Target: s.target, Count: s.in.runs, TripUnknown: s.in.tripUnknown, Branch: s.in.branch,
		Name: s.name, In: s.in.name, OpName: s.opName,
	}
	operands, result, err := s.shapes()
	if err != nil {
		return c, err
	}
	for _, o := range operands {
		c.OperandBytes = satAdd(c.OperandBytes, o.bytes)
	}
	c.ResultBytes = result.bytes
	if w, ok := workspace(s.target, result); ok {
		c.Workspace = w
		c.ResultBytes -= w
	}
	c.Plan = plan(c, p.backendConfig(s.instruction))
	return c, nil
}

// workspace finds the scratch memory of a library call: u8 for cuDNN, s8 for cuBLAS. Other
// calls may return bytes that are data.
func workspace(target string, result *shape) (int64, bool) {
	ours := strings.HasPrefix(target, "__cudnn$") || strings.HasPrefix(target, "__cublas$")
	if !ours || !result.isTuple() || len(result.elems) < 2 {
		return 0, false
	}
	last := result.elems[len(result.elems)-1]
	name := primitives[last.typ].name
	if (name != "u8" && name != "s8") || len(last.dims) != 1 {
		return 0, false
	}
	return last.bytes, true
}

// needsPlan tells the calls that XLA compiles through a cuDNN graph (class
// CuDnnCustomCallVisitor of xla/backends/gpu/transforms/cudnn_custom_call_compiler.cc).
func needsPlan(target string) bool {
	return strings.HasPrefix(target, "__cudnn$fmha") || target == "__cudnn$blockScaledDot"
}

// plan says what one call shows. The pass that compiles plans leaves two traces: it widens a
// workspace of u8[0] to what the plan needs, if it needs any, and it rewrites the configuration
// of an attention backward, which from then on has force_deterministic. The plan itself is not
// in the optimized program, only in the serialized executable.
func plan(c CustomCall, config backendConfig) Plan {
	switch {
	case !needsPlan(c.Target):
		return PlanUnknown
	case c.Workspace > 0:
		return PlanCompiled
	case strings.Contains(c.Target, "Backward") && config.Attention != nil &&
		config.Attention.Deterministic == nil:
		return PlanMissing
	}
	return PlanUnknown
}

// settlePlans lets the calls that show something speak for those that do not: the pass compiles
// all of a program or nothing of it, and one that fails fails the compile.
func settlePlans(calls []CustomCall) {
	verdict := PlanUnknown
	for _, c := range calls {
		verdict = max(verdict, c.Plan) // a plan that is seen outweighs one that is missed
	}
	for i := range calls {
		if needsPlan(calls[i].Target) && calls[i].Plan == PlanUnknown {
			calls[i].Plan = verdict
		}
	}
}

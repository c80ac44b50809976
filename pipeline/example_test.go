package pipeline_test

import (
	"context"
	"fmt"
	"log"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A model of two stages, loss = Σ data·w0·w1, on two devices of one process. Both gradients are
// added up over four microbatches.
func Example() {
	ctx := context.Background()
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: 2})
	check(err)
	defer e.Close()
	s, err := schedule.New("zb-h1", schedule.Shape{Ranks: 2, Micros: 4})
	check(err)

	row := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "row", Size: 2}}}
	first := ir.NewBuilder("first")
	hidden := first.Mul(first.Input("data", ir.Data, row, ""), first.Input("w0", ir.Param, row, ""))
	second := ir.NewBuilder("second")
	loss := second.Sum(second.Mul(second.Input("x", ir.Data, row, ""), second.Input("w1", ir.Param, row, "")), "row")

	place := func(device int, name string, values ...float64) (*engine.Array, error) {
		shape := dtype.Shape{Type: dtype.F32}
		if len(values) > 1 {
			shape.Dims = []int64{int64(len(values))}
		}
		return e.Place(&program.Module{Name: name, Devices: program.Devices{device}},
			program.Array{Name: name, Global: shape}, engine.Copied,
			func(int) ([]byte, error) { return encode(dtype.F32, values), nil })
	}
	ranks := make([]pipeline.Rank, 2)
	for i, b := range []*ir.Builder{first, second} {
		result, bound := hidden, pipeline.Boundary{Outputs: []string{hidden.Name}}
		if i == 1 {
			result, bound = loss, pipeline.Boundary{Inputs: []string{"x"}}
		}
		g, err := b.Graph(result)
		check(err)
		graphs, err := pipeline.Differentiate(g, bound)
		check(err)
		compile := func(g *ir.Graph) *engine.Executable {
			if g == nil { // nobody takes the gradient of the data
				return nil
			}
			text, err := lower.Module(g.Name, g, lower.Options{})
			check(err)
			text.Devices = program.Devices{i}
			x, err := e.Compile(ctx, text)
			check(err)
			return x
		}
		stage := graphs.Stage(compile(graphs.Forward), nil, compile(graphs.Dgrad), compile(graphs.Wgrad))
		defer stage.Free()
		state := &engine.State{}
		defer state.Free()
		for name, values := range map[string][]float64{
			fmt.Sprint("w", i): {10, 1}, fmt.Sprint("g.w", i): {0, 0}, "d." + loss.Name: {1}, // the last for the last stage
		} {
			a, err := place(i, name, values...)
			check(err)
			state.Put(a)
		}
		ranks[i] = pipeline.Rank{Number: i, Stages: []*pipeline.Stage{stage}, State: state, Links: map[int]engine.Link{}}
	}
	ranks[0].Links[1], ranks[1].Links[0], err = e.Pipe(program.Devices{0}, program.Devices{1}, 2)
	check(err)

	p, err := pipeline.New(pipeline.Config{Schedule: s, Ranks: ranks})
	check(err)
	out, err := p.Run(ctx, func(_ context.Context, _, microbatch int, _ *program.Module, spec program.Array) (*engine.Array, error) {
		return place(0, spec.Name, float64(microbatch), 1) // only the first stage asks for data
	})
	check(err)
	defer out.Free()
	for _, r := range out.Results {
		b, err := r.Array.Read(ctx, 0)
		check(err)
		fmt.Println("microbatch", r.Microbatch, "has the loss", decode(b)[0])
	}
	for i, r := range ranks {
		b, err := r.State.Get(fmt.Sprint("g.w", i)).Read(ctx, 0)
		check(err)
		fmt.Println("gradient of", fmt.Sprint("w", i), decode(b))
	}
	fmt.Println("stage 0 held", out.Usage[0].Microbatches, "microbatches")
	// Output:
	// microbatch 0 has the loss 1
	// microbatch 1 has the loss 101
	// microbatch 2 has the loss 201
	// microbatch 3 has the loss 301
	// gradient of w0 [60 4]
	// gradient of w1 [60 4]
	// stage 0 held 2 microbatches
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

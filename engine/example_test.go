package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
)

// sum adds a vector of four numbers, two on each of two devices, up to one of two numbers on both.
var sum = &program.Module{
	Name: "sum", Devices: program.Range(0, 2),
	Mesh:    []program.Axis{{Name: "dp", Size: 2}},
	Args:    []program.Array{{Name: "x", Global: dtype.Shape{Type: dtype.F32, Dims: []int64{4}}, Split: [][]string{{"dp"}}}},
	Results: []program.Array{{Name: "y", Global: dtype.Shape{Type: dtype.F32, Dims: []int64{2}}}},
	Text: `module @sum attributes {mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %y = "stablehlo.all_reduce"(%x) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0,1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    return %y : tensor<2xf32>
  }
}`}

// Example sums the halves of a vector over two devices. README.md shows its body.
func Example() {
	ctx := context.Background()
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: 2})
	if errors.Is(err, diag.EngineMissing) {
		log.Fatal("first run: deepwell engine install cpu")
	} else if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	x, err := e.Place(sum, sum.Args[0], engine.Copied, func(device int) ([]byte, error) {
		return dtype.F32.Append(nil, float64(2*device+1), float64(2*device+2)), nil
	})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Free()
	compiled, err := e.Compile(ctx, sum) // sum is a program.Module: StableHLO and its shapes
	if err != nil {
		log.Fatal(err)
	}
	defer compiled.Free()
	run, err := compiled.Run(ctx, x) // queued on both devices
	if err != nil {
		log.Fatal(err)
	}
	defer run.Free()
	y, err := run.Results[0].Read(ctx, 1) // waits; device 1's copy
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(dtype.F32.Values(y))
	// Output: [4 6]
}

// A State keeps arrays on the devices from step to step. The module donates its counter: Step puts
// the result, which has the counter's memory, in its place.
func ExampleExecutable_Step() {
	ctx := context.Background()
	e, err := engine.Open(ctx, "cpu", engine.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	scalar := dtype.Shape{Type: dtype.F32}
	module := &program.Module{
		Name: "count", Devices: program.Range(0, 1),
		Args:    []program.Array{{Name: "n", Global: scalar, Into: "n"}, {Name: "by", Global: scalar}},
		Results: []program.Array{{Name: "n", Global: scalar}},
		Text: `module @count {
  func.func @main(%n: tensor<f32> {tf.aliasing_output = 0 : i32}, %by: tensor<f32>) -> tensor<f32> {
    %r = stablehlo.add %n, %by : tensor<f32>
    return %r : tensor<f32>
  }
}`}
	count, err := e.Compile(ctx, module)
	if err != nil {
		log.Fatal(err)
	}
	defer count.Free()
	var state engine.State
	defer state.Free()
	for i, value := range []float64{0, 2} {
		a, err := e.Place(module, module.Args[i], engine.Copied, func(int) ([]byte, error) {
			return dtype.F32.Append(nil, value), nil
		})
		if err != nil {
			log.Fatal(err)
		}
		state.Put(a)
	}
	for range 3 {
		if _, err := count.Step(ctx, &state); err != nil { // queued; nothing waits
			log.Fatal(err)
		}
	}
	n, err := state.Get("n").Read(ctx, 0) // waits for the third step
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(dtype.F32.Values(n))
	// Output: [6]
}

package deepwell_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/event"
)

// newEnv is the environment of a program: the user's engines and caches. Events are dropped here;
// event.NewPlain(os.Stderr) prints them.
func newEnv() *deepwell.Env {
	env, err := deepwell.NewEnv(os.Getenv, event.Discard)
	if err != nil {
		log.Fatal(err)
	}
	return env
}

// The fastest plan of an 8B model on eight B200, without pipeline stages. Nothing is run, and no
// GPU is needed.
func ExampleEnv_Plan() {
	found, err := newEnv().Plan(context.Background(), deepwell.PlanJob{
		Source: "llama3.1-8b", Cluster: "8xb200", Seq: 8192,
		Batch: deepwell.Batch{Tokens: 1 << 20},
		Fixed: autoplan.Fixed{"pp": "1"},
		Top:   1,
	})
	if err != nil {
		log.Fatal(err)
	}
	best := found.Choices[0]
	fmt.Println("devices:", best.Plan.Devices(), "sequences:", best.Plan.Batch)
	fmt.Println("fits:", best.Peak < 170<<30, "faster than 10 s:", best.Step < 10)
	// Output:
	// devices: 8 sequences: 128
	// fits: true faster than 10 s: true
}

// A dry run simulates a plan that was saved: time, memory and what would help.
func ExampleEnv_DryRun() {
	ran, err := newEnv().DryRun(context.Background(), deepwell.DryRunJob{
		Plan:   filepath.Join("examples", "plans", "llama3.1-8b-8xb200.json"),
		Tokens: 1e12, Price: 3.00,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(ran.Model, "on", ran.Cluster)
	fmt.Println("fits:", ran.Peak <= ran.Capacity, "· days at $3.00:", ran.Bill.Days > 1)
	// Output:
	// llama3.1-8b on 8xb200
	// fits: true · days at $3.00: true
}

// A StableHLO module is compiled by XLA for two CPU devices. With Cluster "8xb200", the same call
// compiles for eight B200 that need not be there.
func ExampleEnv_Compile() {
	dir, err := os.MkdirTemp("", "deepwell")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "sum.mlir")
	text := `module @sum attributes {mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<1024xf32>) -> tensor<1024xf32> {
    %y = "stablehlo.all_reduce"(%x) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0,1]]> : tensor<1x2xi64>} : (tensor<1024xf32>) -> tensor<1024xf32>
    return %y : tensor<1024xf32>
  }
}`
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		log.Fatal(err)
	}
	made, err := newEnv().Compile(context.Background(), deepwell.CompileJob{Source: path, Cluster: "2xcpu"})
	if err != nil {
		log.Fatal(err)
	}
	report := made.Stages[0]
	fmt.Println(report.Module, "takes", report.Memory.Argument, "bytes of arguments on each device")
	for _, c := range report.Collectives {
		fmt.Println(c.Kind, "over", c.Group, "of", c.Bytes(), "bytes")
	}
	// Output:
	// sum takes 4096 bytes of arguments on each device
	// all-reduce over 1 group of 2 of 4096 bytes
}

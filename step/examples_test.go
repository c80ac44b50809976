package step_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// Attention of every example is cuDNN's, on both data center GPUs of Blackwell, and documents do
// not attend to one another. With context parallelism all devices have the same work, to 5 %.
func TestExamplePlansAttendByCuDNN(t *testing.T) {
	files, err := filepath.Glob("../examples/plans/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal("no plans", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, gpu := range []string{"b200", "gb300"} {
			t.Run(strings.TrimSuffix(filepath.Base(file), ".json")+" "+gpu, func(t *testing.T) {
				p, err := plan.Parse(text, file)
				if err != nil {
					t.Fatal(err)
				}
				cluster, err := machine.ParseCluster(fmt.Sprintf("%dx%s", p.Devices(), gpu))
				if err != nil {
					t.Fatal(err)
				}
				p.Cluster = cluster.String()
				preset, err := model.Find(p.Model)
				if err != nil {
					t.Fatal(err)
				}
				programs, err := step.Build(step.Spec{Model: preset.Config, Recipe: step.RecipeOf(p),
					Arch: cluster.Arch(), Plan: p})
				if err != nil {
					t.Fatal(err)
				}
				for _, note := range append(programs.Notes, programs.Warnings...) {
					kind, kernel, _ := strings.Cut(note, ": ")
					if strings.HasPrefix(kind, "attention") && !strings.HasPrefix(kernel, "cudnn") ||
						strings.Contains(note, "document mask") {
						t.Error(note)
					}
				}
				if most := busiest(p); most > 1.05 {
					t.Errorf("the busiest device has %.2f times the mean of attention", most)
				}
			})
		}
	}
}

// busiest is the work of attention of the device that has the most, in keys that its queries see,
// relative to the mean.
func busiest(p *plan.Plan) float64 {
	cp := p.CP.Shards() // devices that exchange heads have the same sequence
	order := spmd.Order(p)
	each := int64(len(order)) / cp
	var most, sum float64
	for d := range cp {
		work := 0.0
		for _, at := range order[d*each : (d+1)*each] {
			work += float64(at + 1)
		}
		most, sum = max(most, work), sum+work
	}
	return most / sum * float64(cp)
}

package dryrun_test

import (
	"fmt"

	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// Four ranks and eight microbatches: a bubble of 3 in 11, and what a slow rank makes of it.
func Example() {
	list, err := schedule.New("1f1b", schedule.Shape{Ranks: 4, Micros: 8})
	if err != nil {
		fmt.Println(err)
		return
	}
	stage := dryrun.Stage{Forward: 0.1, Input: 0.1, Weight: 0.1,
		Load: schedule.Load{Residuals: 5 << 30}}
	stage.Passing[schedule.Forward] = stage.Residuals // while the pass runs that fills it
	params := program.Memory{Params: 40 << 30}
	step := &dryrun.Step{Schedule: list, Stages: []dryrun.Stage{stage, stage, stage, stage},
		Ranks: []program.Memory{params, params, params, params}}
	for _, what := range []dryrun.WhatIf{{}, {Slow: 1.2, Straggler: 2}} {
		line, err := step.Run(what)
		if err != nil {
			fmt.Println(err)
			return
		}
		peak, rank := line.Peak()
		fmt.Printf("%.2f s, bubble %.1f %%, rank %d holds %d GiB\n", line.Step, 100*line.Bubble, rank,
			peak.Sum()>>30)
	}
	// Output:
	// 3.30 s, bubble 27.3 %, rank 0 holds 60 GiB
	// 3.72 s, bubble 32.3 %, rank 0 holds 60 GiB
}

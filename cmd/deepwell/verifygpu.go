package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/gpucheck"
	"github.com/deepwell/deepwell/internal/human"
)

// verifyGPU checks what this host's GPUs compute.
func (a *app) verifyGPU(cmd *cobra.Command, args []string, job deepwell.VerifyGPUJob) error {
	if len(args) > 0 {
		return diag.New(diag.BadUsage, "verify --gpu takes no plan: it has programs of its own").
			Try("deepwell verify --gpu; or deepwell verify --replay %s", args[0])
	}
	text := &gpuText{w: a.stdout}
	if !a.json {
		job.Progress = text.check
	}
	done, err := call(a, cmd, (*deepwell.Env).VerifyGPU, job)
	if done == nil {
		return err
	}
	if a.print(done); !a.json {
		text.end(done)
		if job.Out != "" {
			fmt.Fprintf(a.stdout, "\nwrote %s · next: attach it to an issue if anything is wrong\n", job.Out)
		}
	}
	return err
}

// A gpuText prints checks as they are done.
type gpuText struct {
	w     io.Writer
	group string
}

func (t *gpuText) check(c gpucheck.Check) {
	if c.Group != t.group {
		if t.group != "" {
			fmt.Fprintln(t.w)
		}
		t.group = c.Group
		fmt.Fprintf(t.w, "%-28s %-8s %-8s %-8s %s\n", c.Group, "", "apart", "bound", "")
	}
	apart, bound, says := "-", "-", c.Note
	if c.Arrays > 0 && c.Why != "" && c.Bound > 0 {
		apart, bound = human.Small(c.Apart), human.Small(c.Bound)
	}
	if says == "" {
		says = strings.Join(c.Calls, " ")
	}
	fmt.Fprintln(t.w, strings.TrimRight(fmt.Sprintf("  %-26s %-8s %-8s %-8s %s", c.Name, c.Status,
		apart, bound, says), " "))
}

// end prints what follows from the checks.
func (t *gpuText) end(r *gpucheck.Report) {
	w := t.w
	fmt.Fprintln(w, "\ncustom calls of our programs")
	for _, c := range r.Calls {
		fmt.Fprintf(w, "  %-28s %-8s %s\n", c.Target, c.Status, c.By+c.Note)
	}
	fmt.Fprintln(w, "\nconventions that replays trust")
	for _, c := range r.Conventions {
		fmt.Fprintf(w, "  %-19s %-11s %s\n", c.Name, c.Verdict, c.By)
	}
	fmt.Fprintf(w, "\n%-24s %-10s %-10s %s\n", "a training step", "predicted", "measured", r.Timed)
	for _, s := range r.Times {
		measured := s.Note
		if s.Measured > 0 {
			measured = fmt.Sprintf("%-10s", seconds(s.Measured))
		}
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("  %-22s %-10s %s", s.Precision,
			seconds(s.Predicted), measured), " "))
	}
	t.versions(r)
	count := map[gpucheck.Status]int{}
	for _, c := range r.Checks {
		count[c.Status]++
	}
	fmt.Fprintf(w, "\n%d checks: %d ok, %d beyond, %d failed, %d skipped, in %.0f s\n", len(r.Checks),
		count[gpucheck.OK], count[gpucheck.Beyond], count[gpucheck.Failed], count[gpucheck.Skipped],
		r.Seconds)
}

func (t *gpuText) versions(r *gpucheck.Report) {
	w := t.w
	fmt.Fprintf(w, "\n%d × %s (%s), %s each · driver %s, CUDA %s\n", r.Count, r.GPU, r.Arch,
		event.Size(r.Memory), r.Driver, r.CUDA)
	var list []string
	for _, name := range []string{"plugin", "pjrt", "cuda_runtime", "cublas_lt", "cudnn", "nccl"} {
		list = append(list, name+" "+cmp.Or(r.Versions[name], "not there"))
	}
	fmt.Fprintln(w, strings.Join(list, " · "))
	if r.WithoutCuDNN != "" {
		fmt.Fprintln(w, r.WithoutCuDNN)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Flags)) {
		fmt.Fprintf(w, "  %s=%s\n", name, r.Flags[name])
	}
}

// seconds writes a short time.
func seconds(s float64) string {
	switch {
	case s <= 0:
		return "-"
	case s < 999.5e-6:
		return fmt.Sprintf("%.3g µs", 1e6*s)
	case s < 999.5e-3:
		return fmt.Sprintf("%.3g ms", 1e3*s)
	}
	return fmt.Sprintf("%.3g s", s)
}

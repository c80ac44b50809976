// Command context compiles the example plans with context parallelism for B200 and GB300, and
// holds the memory's peak to the dry run's and attention to cuDNN. With -published it holds plans
// for long sequences to rates that others published instead. No GPU is used.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/plan"
)

func main() {
	runs := flag.String("published", "", "a table of published runs to hold plans to; compile nothing")
	flag.Parse()
	if err := run(context.Background(), os.Stdout, *runs); err != nil {
		fmt.Fprintln(os.Stderr, "context:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, to io.Writer, runs string) error {
	env, err := deepwell.NewEnv(os.Getenv, event.Discard)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	if runs != "" {
		err = published(ctx, env, w, runs)
	} else {
		err = compiled(ctx, env, w, "examples/plans")
	}
	if err != nil {
		return err
	}
	return w.Flush()
}

// compiled tells the compiled peak of the plans of a folder that have context parallelism.
func compiled(ctx context.Context, env *deepwell.Env, w io.Writer, dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "context")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	fmt.Fprintln(w, "plan\tGPU\tcp\tcompiled, GiB\tdry run, GiB\tdry run / compiled\t"+
		"cuDNN's calls\tplain")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		p, err := plan.Parse(text, file)
		if err != nil {
			return err
		}
		for _, gpu := range []string{"b200", "gb300"} {
			if p.CP.Size < 2 {
				continue
			}
			p.Cluster = fmt.Sprintf("%dx%s", p.Devices(), gpu)
			path := filepath.Join(scratch, filepath.Base(file))
			if text, err = p.Marshal(); err == nil {
				err = os.WriteFile(path, text, 0o600)
			}
			if err != nil {
				return err
			}
			if err := line(ctx, env, w, p, path); err != nil {
				return fmt.Errorf("%s for %s: %w", file, gpu, err)
			}
		}
	}
	return nil
}

// line compiles a plan and runs it dry.
func line(ctx context.Context, env *deepwell.Env, w io.Writer, p *plan.Plan, path string) error {
	made, err := env.Compile(ctx, deepwell.CompileJob{Source: path})
	if err != nil {
		return err
	}
	dry, err := env.DryRun(ctx, deepwell.DryRunJob{Plan: path})
	if err != nil {
		return err
	}
	var peak int64
	for _, r := range made.Ranks {
		peak = max(peak, r.Sum())
	}
	calls, plain := 0, 0
	for _, s := range made.Stages {
		for _, c := range s.CustomCalls {
			if strings.HasPrefix(c.Target, "__cudnn$fmha") && c.Plan == hlo.PlanCompiled {
				calls++
			}
		}
		for _, note := range s.Notes {
			kind, kernel, _ := strings.Cut(note, ": ")
			if strings.HasPrefix(kind, "attention") && !strings.HasPrefix(kernel, "cudnn") {
				plain++
			}
		}
	}
	const gib = 1 << 30
	_, err = fmt.Fprintf(w, "%s\t%s\t%s\t%.1f\t%.1f\t%.3f\t%d\t%d\n",
		strings.TrimSuffix(filepath.Base(path), ".json"), p.Cluster,
		fmt.Sprint(p.CP.Size, " ", p.CP.Kind), float64(peak)/gib, float64(dry.Peak)/gib,
		float64(dry.Peak)/float64(peak), calls, plain)
	return err
}

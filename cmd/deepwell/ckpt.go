package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/event"
)

// ckpt groups the commands about checkpoints on disk.
func (a *app) ckpt() *cobra.Command {
	return group("ckpt", a.ckptList(), a.ckptVerify(), a.ckptDiff(), a.ckptPrune())
}

func (a *app) ckptList() *cobra.Command {
	return documented("ckpt list", &cobra.Command{
		Aliases: []string{"ls"},
		Args:    takes(1, "a run's checkpoints folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			list, err := call(a, cmd, (*deepwell.Env).ListCheckpoints, args[0])
			if err != nil {
				return err
			}
			return a.printCheckpoints(list, "complete")
		},
	})
}

func (a *app) ckptVerify() *cobra.Command {
	return documented("ckpt verify", &cobra.Command{
		Args: takes(1, "a checkpoint, or a folder of them"),
		RunE: func(cmd *cobra.Command, args []string) error {
			list, err := call(a, cmd, (*deepwell.Env).VerifyCheckpoints, args[0])
			if len(list) > 0 {
				if err := a.printCheckpoints(list, "verified"); err != nil {
					return err
				}
			}
			return err
		},
	})
}

// printCheckpoints prints a table; well is the state of a checkpoint without errors.
func (a *app) printCheckpoints(list []ckpt.Info, well string) error {
	return a.tell(map[string]any{"checkpoints": list}, func() error {
		return a.table("STEP\tSIZE\tFILES\tTENSORS\tSTATE", func(w io.Writer) {
			for _, c := range list {
				state := well
				if c.Err != nil {
					state = string(c.Err.Code) + " " + c.Err.What
				}
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\n", c.Step, event.Size(c.Bytes),
					whole(int64(c.Files)), whole(int64(c.Tensors)), state)
			}
		})
	})
}

func (a *app) ckptDiff() *cobra.Command {
	return documented("ckpt diff", &cobra.Command{
		Args: takes(2, "two checkpoints, or folders of them"),
		RunE: func(cmd *cobra.Command, args []string) error {
			diff := func(e *deepwell.Env, ctx context.Context, _ any) (*deepwell.CheckpointDiff, error) {
				return e.DiffCheckpoints(ctx, args[0], args[1])
			}
			return serve(a, cmd, diff, nil, a.printDiff)
		},
	})
}

func (a *app) printDiff(d *deepwell.CheckpointDiff) error {
	if d.Equal {
		fmt.Fprintf(a.stdout, "all %d tensors are bit-equal\n", d.Tensors)
		return nil
	}
	err := a.table("TENSOR\tTYPE\tDIFFERENT\tMAX ABS\tMAX REL\tNOT FINITE", func(w io.Writer) {
		for _, t := range d.Differ {
			switch {
			case t.Comparable():
				fmt.Fprintf(w, "%s\t%s\t%d\t%.3g\t%.3g\t%s\n", t.Name, t.A, t.Elements, t.MaxAbs,
					t.MaxRel, whole(t.NoValue))
			case t.B == "":
				fmt.Fprintf(w, "%s\t%s\tonly in A\n", t.Name, t.A)
			case t.A == "":
				fmt.Fprintf(w, "%s\t%s\tonly in B\n", t.Name, t.B)
			default:
				fmt.Fprintf(w, "%s\t%s\tis %s in B\n", t.Name, t.A, t.B)
			}
		}
	})
	if err == nil {
		_, err = fmt.Fprintf(a.stdout, "%d of %d tensors differ\n", len(d.Differ), d.Tensors)
	}
	return err
}

func (a *app) ckptPrune() *cobra.Command {
	var keep int
	cmd := documented("ckpt prune", &cobra.Command{
		Args: takes(1, "a run's checkpoints folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !cmd.Flags().Changed("keep") {
				return usage(cmd, "prune needs --keep, the number of checkpoints to keep")
			}
			prune := func(e *deepwell.Env, ctx context.Context, dir string) ([]ckpt.Info, error) {
				return e.PruneCheckpoints(ctx, dir, keep)
			}
			removed, err := call(a, cmd, prune, args[0])
			if err != nil {
				return err
			}
			all := map[string]any{"removed": append([]ckpt.Info{}, removed...)}
			return a.tell(all, func() error {
				for _, c := range removed {
					fmt.Fprintf(a.stdout, "removed step %d, %s\n", c.Step, event.Size(c.Bytes))
				}
				if len(removed) == 0 {
					fmt.Fprintln(a.stdout, "nothing to remove")
				}
				return nil
			})
		},
	})
	cmd.Flags().IntVar(&keep, "keep", 0, "number of checkpoints to keep, at least one")
	return cmd
}

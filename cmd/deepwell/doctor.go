package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/event"
)

// checksTo shows each check as it is done, on standard output: the checks are what doctor is asked
// for, not news about it.
func (a *app) checksTo(others event.Sink) event.Sink {
	return sinkFunc(func(e event.Event) {
		c, ok := e.(event.Checked)
		switch {
		case !ok:
			others.Emit(e)
		case !a.json:
			a.finish()
			fmt.Fprintln(a.stdout, c.Line())
		}
	})
}

func (a *app) doctor() *cobra.Command {
	return documented("doctor", &cobra.Command{
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			check := func(e *deepwell.Env, ctx context.Context, _ any) (*deepwell.DoctorResult, error) {
				e.Events = a.checksTo(e.Events)
				return e.Doctor(ctx)
			}
			d, err := call(a, cmd, check, nil)
			if err != nil {
				return err
			}
			a.print(d)
			if err = d.Err(); err == nil && !a.json {
				fmt.Fprintln(a.stdout, "all checks passed")
			}
			return err
		},
	})
}

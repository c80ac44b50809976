package main

import (
	"fmt"

	"github.com/spf13/cobra"

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

// A sinkFunc is a function that takes events.
type sinkFunc func(event.Event)

func (f sinkFunc) Emit(e event.Event) { f(e) }

func (a *app) doctor() *cobra.Command {
	return documented("doctor", &cobra.Command{
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			env, err := a.env()
			if err != nil {
				return err
			}
			env.Events = a.checksTo(env.Events)
			d, err := env.Doctor(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				a.print(d)
			}
			if err := d.Err(); err != nil {
				return err
			}
			if !a.json {
				a.finish()
				fmt.Fprintln(a.stdout, "all well: nothing to change")
			}
			return nil
		},
	})
}

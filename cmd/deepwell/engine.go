package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/plugin"
)

// engine groups the commands about engines on disk.
func (a *app) engine() *cobra.Command {
	return group("engine", a.engineInstall(), a.engineList(), a.engineRemove())
}

func (a *app) engineInstall() *cobra.Command {
	var from []string
	cmd := documented("engine install", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, "install needs the name of an engine: %v", plugin.Names())
			}
			env, err := a.env()
			if err != nil {
				return err
			}
			done := []event.Installed{}
			for _, name := range args {
				b, err := env.Install(cmd.Context(), name, from)
				if err != nil {
					return err
				}
				done = append(done, event.Installed{Engine: b.Name, Digest: b.Digest})
			}
			a.print(map[string]any{"installed": done})
			return nil
		},
	})
	cmd.Flags().StringArrayVar(&from, "from", nil,
		"a wheel, or a folder of wheels, to use instead of pip")
	return cmd
}

func (a *app) engineList() *cobra.Command {
	return documented("engine list", &cobra.Command{
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			env, err := a.env()
			if err != nil {
				return err
			}
			all, err := plugin.List(env.Engines)
			if err != nil {
				return err
			}
			return a.tell(map[string]any{"engines": all}, func() error {
				return a.table("ENGINE\tVERSION\tSTATE\tWHAT IT DOES", func(w io.Writer) {
					for _, s := range all {
						fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", s.Name, s.Version, state(s), s.Purpose)
					}
				})
			})
		},
	})
}

func state(s plugin.Status) string {
	switch {
	case s.Exposed != "":
		return "refused: " + s.Exposed
	case s.Installed:
		return "installed, " + event.Size(s.Bytes)
	case !s.Available:
		return "not for this host"
	}
	return event.Size(s.Download) + " to download"
}

func (a *app) engineRemove() *cobra.Command {
	return documented("engine remove", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, "remove needs the name of an engine: %v", plugin.Names())
			}
			env, err := a.env()
			if err != nil {
				return err
			}
			for _, name := range args {
				if err := plugin.Remove(env.Engines, name); err != nil {
					return err
				}
			}
			a.print(map[string]any{"removed": args})
			return nil
		},
	})
}

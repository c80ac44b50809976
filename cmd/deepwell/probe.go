package main

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/machine"
)

func (a *app) probe() *cobra.Command {
	var measure bool
	var out string
	cmd := documented("probe", &cobra.Command{
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			env, err := a.env()
			if err != nil {
				return err
			}
			m, err := env.Probe(cmd.Context(), machine.Options{}, measure)
			if err != nil {
				return err
			}
			js, err := m.Marshal()
			if err != nil {
				return err
			}
			if out != "" {
				if err := atomicfile.Write(out, js, 0o644); err != nil {
					return diag.New(diag.FileError, "cannot write %s", out).Wrap(err)
				}
			}
			a.finish()
			if a.json {
				_, err = a.stdout.Write(js)
				return err
			}
			a.print(json.RawMessage(js))
			return m.WriteTable(a.stdout)
		},
	})
	cmd.Flags().BoolVar(&measure, "measure", false,
		"also time matmuls, copies and all-reduces on the CPU engine")
	cmd.Flags().StringVarP(&out, "output", "o", "", "also write machine.json to this file")
	return cmd
}

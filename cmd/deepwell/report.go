package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/internal/human"
)

func (a *app) report() *cobra.Command {
	job := deepwell.ReportJob{}
	cmd := documented("report", &cobra.Command{
		Args: runFolders,
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Runs = args
			return serve(a, cmd, (*deepwell.Env).Report, job, func(done *deepwell.ReportResult) error {
				for _, r := range done.Runs {
					fmt.Fprintf(a.stdout, "%s  step %s of %s", r.Folder, human.Thousands(int64(r.Step)),
						human.Thousands(int64(r.Steps)))
					if r.Loss != nil {
						fmt.Fprintf(a.stdout, "  loss %.4g", *r.Loss)
					}
					if r.Eval != nil {
						fmt.Fprintf(a.stdout, "  eval %.4g", *r.Eval)
					}
					fmt.Fprintln(a.stdout)
				}
				fmt.Fprintf(a.stdout, "wrote %s\n", done.Output)
				return nil
			})
		},
	})
	cmd.Flags().StringVarP(&job.Output, "output", "o", "report.html", "HTML file to write")
	return cmd
}

func (a *app) serve() *cobra.Command {
	job := deepwell.ReportJob{}
	cmd := documented("serve", &cobra.Command{
		Args: runFolders,
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Runs = args
			job.Opened = func(url string) { // with --json, too: there is no other way to learn it
				fmt.Fprintf(a.stderr, "open %s · Ctrl-C ends\n", url)
			}
			_, err := call(a, cmd, (*deepwell.Env).Report, job)
			return err
		},
	})
	cmd.Flags().StringVar(&job.Listen, "listen", "127.0.0.1:0",
		"address to listen on; port 0 is a free one, other hosts need the token that is printed")
	return cmd
}

// runFolders demands the folders of one or more runs.
func runFolders(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usage(cmd, "%s needs the folder of a run", cmd.Name())
	}
	return nil
}

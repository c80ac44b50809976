package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
)

func (a *app) launch() *cobra.Command {
	job := deepwell.LaunchJob{}
	run := &job.Run
	cmd := documented("launch", &cobra.Command{
		Args: one("recipe"),
		RunE: func(cmd *cobra.Command, args []string) error {
			run.Recipe = args[0]
			switch "" {
			case job.To:
				return usage(cmd, "launch needs --to")
			case run.Plan:
				return usage(cmd, "launch needs --plan")
			}
			if job.To == "local" {
				outlivePipe()
				job.Output = a.stderr
			}
			return serve(a, cmd, (*deepwell.Env).Launch, job, func(r *deepwell.LaunchResult) error {
				_, err := fmt.Fprint(a.stdout, r.Text)
				return err
			})
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.To, "to", "",
		"local starts the run on this host; slurm or jobset writes what a scheduler takes")
	flags.StringVar(&run.Plan, "plan", "", "plan file; its cluster has the hosts")
	flags.StringArrayVar(&run.Set, "set", nil, "override a key of the recipe, such as steps=500")
	flags.StringVar(&run.Name, "name", "", "name of the job (default: the plan's)")
	flags.StringVar(&run.Key, "key-file", "",
		"secret of the processes (default: run.key beside the recipe; local: made for each start)")
	flags.IntVar(&run.Hosts, "processes", 0, "number of processes (local; default: the plan's hosts)")
	flags.IntVar(&run.Port, "port", 0,
		"port of the processes (default: 7000; local: the first of several, by default free ones)")
	flags.StringVar(&run.Image, "image", "", "container image with deepwell and its engine (jobset)")
	flags.StringVar(&run.Volume, "volume", "", "claim of the shared file system (jobset)")
	flags.StringVar(&run.Folder, "folder", "/shared",
		"where the volume is mounted, and the command starts (jobset)")
	flags.IntVar(&run.Restarts, "restarts", 100, "restarts after which the run fails")
	return cmd
}

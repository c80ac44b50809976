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
			if run.Plan == "" || job.To == "" {
				return usage(cmd, "launch needs --to and --plan")
			}
			return serve(a, cmd, (*deepwell.Env).Launch, job, func(r *deepwell.LaunchResult) error {
				_, err := fmt.Fprint(a.stdout, r.Text)
				return err
			})
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.To, "to", "", "scheduler: slurm or jobset")
	flags.StringVar(&run.Plan, "plan", "", "plan file; its cluster has the hosts")
	flags.StringArrayVar(&run.Set, "set", nil, "override a key of the recipe, such as steps=500")
	flags.StringVar(&run.Name, "name", "", "name of the job (default: the plan's)")
	flags.StringVar(&run.Key, "key-file", "",
		"secret of the processes (default: run.key beside the recipe)")
	flags.IntVar(&run.Port, "port", 7000, "port of the processes")
	flags.StringVar(&run.Image, "image", "", "container image with deepwell and its engine (jobset)")
	flags.StringVar(&run.Volume, "volume", "", "claim of the shared file system (jobset)")
	flags.StringVar(&run.Folder, "folder", "/run", "where that is mounted (jobset)")
	flags.IntVar(&run.Restarts, "restarts", 100, "restarts after which the JobSet fails (jobset)")
	return cmd
}

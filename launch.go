package deepwell

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/launch"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// A LaunchJob is a run that a cluster's scheduler starts.
type LaunchJob struct {
	To string // the scheduler: "slurm" or "jobset"
	// Run is the run; hosts and GPUs come from its plan's cluster. Name, Key and Port may be left
	// out: the plan's name, run.key beside the recipe, and 7000.
	Run launch.Run
}

// A LaunchResult is what the scheduler takes.
type LaunchResult struct {
	Text  string `json:"text"`
	Hosts int    `json:"hosts"`
	GPUs  int    `json:"gpus_per_host"`
}

// Launch writes what a scheduler takes to start a run on its plan's cluster, one process a host. It
// finds what would end every process at its start: a recipe or a plan that is not well formed.
func (e *Env) Launch(ctx context.Context, job LaunchJob) (*LaunchResult, error) {
	v := e.begin(ctx, "launch")
	run := &job.Run
	v.pass("read the recipe", func() error {
		r := &runner{env: e, job: TrainJob{Path: run.Recipe, Set: run.Set}}
		return r.readRecipe()
	})
	cluster := get(v, "read the plan", func() (machine.Cluster, error) { return hostsOf(run.Plan) })
	text := get(v, "write the script", func() (string, error) {
		run.Hosts, run.GPUs = cluster.Hosts(), cluster.DevicesPerHost
		if run.Name == "" {
			run.Name = strings.TrimSuffix(filepath.Base(run.Plan), ".json")
		}
		if run.Key == "" {
			run.Key = filepath.Join(filepath.Dir(run.Recipe), "run.key")
		}
		return launch.Script(job.To, *run)
	})
	if v.err != nil {
		return nil, v.err
	}
	return &LaunchResult{Text: text, Hosts: run.Hosts, GPUs: run.GPUs}, nil
}

// hostsOf reads the cluster of a plan, whose hosts must be able to share the pipeline's ranks.
func hostsOf(path string) (machine.Cluster, error) {
	p, _, err := readPlanKeys(path)
	if err != nil {
		return machine.Cluster{}, err
	}
	c, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		return c, err
	}
	bad := func(format string, args ...any) *diag.Error {
		return diag.New(diag.PlanMisfit, format, args...).At("%s: cluster", path)
	}
	ranks, hosts := int(max(1, p.Size(plan.PipelineAxis))), c.Hosts()
	switch {
	case c.CPU():
		return c, bad("the plan is for CPU devices, which no scheduler starts").
			Try("deepwell plan ... --cluster 8xb200")
	case ranks%hosts != 0 && hosts%ranks != 0:
		return c, bad("%d pipeline ranks and %d hosts do not divide evenly", ranks, hosts).
			Try("a plan whose pp.size divides the number of hosts, or is a multiple of it")
	}
	return c, nil
}

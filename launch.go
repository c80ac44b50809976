package deepwell

import (
	"cmp"
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/launch"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/machine"
)

// A LaunchJob is a run that is started on this host, or by a cluster's scheduler.
type LaunchJob struct {
	To string // "local", or the scheduler: "slurm" or "jobset"
	// Run is the run; hosts and GPUs come from its plan's cluster. Name, Key and Port may be left
	// out: the plan's name, run.key beside the recipe, and 7000. On this host, Hosts is the number of
	// processes, by default the plan's hosts; a key is made for each start, and ports that are free
	// are taken.
	Run launch.Run
	// Command is the program that trains, on this host; "" is this one. Output takes what its
	// processes print.
	Command string
	Output  io.Writer
}

// A LaunchResult is what the scheduler takes, or how often a run on this host was started again.
type LaunchResult struct {
	Text     string `json:"text,omitempty"`
	Hosts    int    `json:"hosts"`
	GPUs     int    `json:"gpus_per_host"`
	Restarts int    `json:"restarts,omitempty"`
}

// Launch starts the processes of a run on this host and waits for their end, or writes what a
// scheduler takes to start a run on its plan's cluster, one process a host. It finds what would end
// every process at its start: a recipe or a plan that is not well formed.
func (e *Env) Launch(ctx context.Context, job LaunchJob) (*LaunchResult, error) {
	v := e.begin(ctx, "launch")
	run := &job.Run
	v.pass("check the numbers", func() error {
		if run.Restarts < 0 || run.Port < 0 || run.Port > 65535 || run.Hosts < 0 {
			return diag.New(diag.BadUsage, "--restarts %d, --port %d or --processes %d is out of range",
				run.Restarts, run.Port, run.Hosts).Try("numbers from 0 on, and a port of at most 65535")
		}
		return nil
	})
	v.pass("read the recipe", func() error {
		r := &runner{env: e, job: TrainJob{Path: run.Recipe, Set: run.Set}}
		return r.readRecipe()
	})
	if job.To == "local" {
		restarts := get(v, "run the processes", func() (int, error) { return e.launchHere(ctx, &job) })
		if v.err != nil {
			return nil, v.err
		}
		return &LaunchResult{Hosts: run.Hosts, GPUs: run.GPUs, Restarts: restarts}, nil
	}
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

// launchHere runs the processes of a run on this host.
func (e *Env) launchHere(ctx context.Context, job *LaunchJob) (restarts int, err error) {
	run := &job.Run
	p, _, err := readPlanKeys(run.Plan)
	if err != nil {
		return 0, err
	}
	c, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		return 0, err
	}
	run.Hosts = cmp.Or(run.Hosts, c.Hosts())
	devices := int(p.Devices())
	if run.Hosts < 1 || devices%run.Hosts != 0 {
		return 0, diag.New(diag.PlanMisfit, "%d processes cannot share %d devices evenly", run.Hosts,
			devices).At("%s", run.Plan).Try("--processes with a divisor of %d", devices)
	}
	run.GPUs = devices / run.Hosts
	command := job.Command
	if command == "" {
		if command, err = os.Executable(); err != nil {
			return 0, diag.New(diag.FileError, "this program cannot be found").Wrap(err)
		}
	}
	l := &launch.Local{Command: []string{command, "train", run.Recipe, "--plan", run.Plan},
		Processes: run.Hosts, Key: run.Key, Restarts: run.Restarts, Output: job.Output,
		Addresses: func(n int) ([]string, error) { return addresses(run.Port, n) }}
	for _, one := range run.Set {
		l.Command = append(l.Command, "--set", one)
	}
	if visible := os.Getenv(visibleDevices); !c.CPU() && run.Hosts > 1 && visible != "" &&
		len(strings.Split(visible, ",")) < devices {
		return 0, diag.New(diag.GPUsMissing, "%s=%s shows fewer GPUs than the plan's %d", visibleDevices,
			visible, devices).At("%s", run.Plan).Try("name %d of them, or unset it", devices)
	}
	if !c.CPU() && run.Hosts > 1 {
		l.Env = func(i int) []string {
			return append(os.Environ(), visibleDevices+"="+shareOf(os.Getenv(visibleDevices), i, run.GPUs))
		}
	}
	return l.Run(ctx)
}

// shareOf lists the GPUs of process i, n of those that visible lists, or of all.
func shareOf(visible string, i, n int) string {
	var all []string
	if visible != "" {
		all = strings.Split(visible, ",")
	}
	var list []string
	for at := i * n; at < (i+1)*n; at++ {
		if all == nil {
			list = append(list, strconv.Itoa(at))
		} else {
			list = append(list, all[at])
		}
	}
	return strings.Join(list, ",")
}

// addresses are n of this host's: from a port on, or free ones if it is 0.
func addresses(port, n int) (list []string, err error) {
	if port == 0 {
		return link.FreeAddresses(n)
	}
	for i := range n {
		list = append(list, "127.0.0.1:"+strconv.Itoa(port+i))
	}
	return list, nil
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
	if c.CPU() {
		return c, bad("the plan is for CPU devices, which no scheduler starts").
			Try("deepwell plan ... --cluster 8xb200")
	}
	if e := sharesEvenly(p, c.Hosts()); e != nil {
		return c, e.At("%s: cluster", path)
	}
	return c, nil
}

package deepwell

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"syscall"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/train"
)

const (
	// arrival is how many times its patience a run waits at the start for processes that have not
	// connected: they read data and compile before.
	arrival = 30
	// minKey has as many bits as the key that is derived from it; more than maxKey is some other
	// file.
	minKey, maxKey = 32, 1 << 20
)

// listen opens this process's end of the links to the other processes of a run.
func (r *runner) listen(ctx context.Context) (*train.Processes, error) {
	n := len(r.job.Peers)
	bad := func(format string, args ...any) *diag.Error {
		return diag.New(diag.PlanMisfit, format, args...).At("%s", r.job.Plan)
	}
	switch {
	case r.devices.gpus != nil && r.plan == nil:
		return nil, bad("%d processes need a plan", n).Try("--plan PLAN")
	case r.devices.gpus != nil:
		if e := sharesEvenly(r.plan, n); e != nil {
			return nil, e.At("%s", r.job.Plan)
		}
	case r.plan == nil || r.plan.Size(plan.PipelineAxis)%int64(n) != 0:
		return nil, bad("%d processes cannot share the pipeline stages evenly", n).
			Try("a plan whose pp.size is a multiple of %d", n)
	}
	if r.job.Self < 0 || r.job.Self >= n {
		return nil, bad("there is no process %d of %d", r.job.Self, n).Try("--self 0 to %d", n-1)
	}
	h := fnv.New64a() // identifies the run: processes of another one are refused
	same := *r.recipe // without the folder, in which processes may differ
	same.Out = ""
	how := *r.plan
	how.Model = "" // a path; what is in it is compared once processes are connected
	fmt.Fprintln(h, same.String(), how.String(), r.job.Until)
	secret, err := readKey(r.job.KeyFile)
	if err != nil {
		return nil, err
	}
	hub, err := link.Listen(ctx, r.job.Peers[r.job.Self], h.Sum64(), secret, r.early())
	if err != nil {
		return nil, err
	}
	if r.job.Patience > 0 {
		hub.HeartbeatTimeout, hub.StallTimeout = r.job.Patience, arrival*r.job.Patience
	}
	return &train.Processes{Self: r.job.Self, Addresses: r.job.Peers, Hub: hub}, nil
}

// sharesEvenly returns an error if the processes of one client, as many as hosts, would not have
// equally many devices of the plan, and either whole pipeline ranks or equal parts of one.
func sharesEvenly(p *plan.Plan, processes int) *diag.Error {
	n, ranks := int64(processes), max(1, p.Size(plan.PipelineAxis))
	if p.Devices()%n == 0 && (ranks%n == 0 || n%ranks == 0) {
		return nil
	}
	return diag.New(diag.PlanMisfit, "%d hosts or processes cannot share the %d devices and %d"+
		" pipeline ranks of the plan evenly", n, p.Devices(), ranks).
		Try("a plan whose devices are a multiple of the hosts, and whose pp.size divides their number" +
			" or is a multiple of it")
}

// readKey reads the secret that the processes of a run share. As ssh does, it refuses a file that
// others may read.
func readKey(path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	bad := func(format string, args ...any) *diag.Error {
		return diag.New(diag.LinkKey, format, args...).At("%s", path)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not make it wait
	if err != nil {
		return nil, bad("the key cannot be read").Wrap(err).
			Try("head -c 32 /dev/urandom > %s; chmod 600 %s", path, path)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, bad("the key cannot be read").Wrap(err)
	}
	owner, _ := info.Sys().(*syscall.Stat_t)
	switch me := os.Getuid(); {
	case !info.Mode().IsRegular():
		return nil, bad("the key is no plain file").Try("give a plain file")
	case info.Mode().Perm()&0o077 != 0:
		return nil, bad("others may read or write the key: its mode is %04o", info.Mode().Perm()).
			Try("chmod 600 %s", path)
	case owner != nil && int(owner.Uid) != me && owner.Uid != 0:
		return nil, bad("the key belongs to another user").Try("chown %d %s", me, path)
	}
	secret, err := io.ReadAll(io.LimitReader(f, maxKey+1))
	switch n := len(secret); {
	case err != nil:
		return nil, bad("the key cannot be read").Wrap(err)
	case n < minKey || n > maxKey:
		return nil, bad("a key has %d bytes to 1 MiB; this one has %d", minKey, n).
			Try("head -c 32 /dev/urandom > %s", path)
	}
	return secret, nil
}

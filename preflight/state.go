package preflight

import (
	"cmp"
	"context"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/machine"
)

// Inspect notes what the driver tells of the GPUs, without using them: it takes no time.
func Inspect(r *Result, o Options) {
	m := o.Machine
	r.Driver, r.CUDA = m.Driver, m.CUDA
	name := "cuda13"
	if o.Engine != nil {
		name = o.Engine.Name()
	}
	if err := machine.CheckDriver(name, m.Driver); err != nil {
		bad := diag.From(err)
		r.problem(o.Process, -1, bad.Fix, "%s", bad.What)
	}
	for i, g := range m.GPUs {
		one := GPU{Process: o.Process, Number: i, Name: g.Name, FreeBytes: g.FreeBytes,
			TotalBytes: g.MemoryBytes, ECC: g.ECC, ECCUncorrected: g.ECCUncorrected,
			ClockMHz: g.ClockNowMHz, ClockMaxMHz: g.ClockMHz, TemperatureC: g.TemperatureC,
			Throttled: g.Throttled}
		for _, l := range g.Links {
			if l.To != "down" {
				one.Links += l.Count
			}
		}
		r.GPUs = append(r.GPUs, one)
		r.memoryOf(o.Process, i, g)
		r.linksOf(o.Process, i, m)
		if g.MIG == "on" {
			r.problem(o.Process, i, "nvidia-smi -mig 0", "it is split by MIG")
		}
		if g.Name != m.GPUs[0].Name {
			r.problem(o.Process, i, "CUDA_VISIBLE_DEVICES with GPUs of one kind", "it is %s, and GPU 0 %s",
				g.Name, m.GPUs[0].Name)
		}
		r.clocksOf(o.Process, i, g)
	}
}

// memoryOf looks at a GPU's memory: who uses it, and whether it errs.
func (r *Result) memoryOf(process, i int, g machine.GPU) {
	if g.ECC == "off" {
		r.problem(process, i, "nvidia-smi -e 1, and a reboot", "ECC is off: flipped bits go unnoticed")
	}
	if g.ECCUncorrected > 0 {
		r.problem(process, i, "nvidia-smi -q -d ECC; reset the GPU, and take it out if it goes on",
			"%d uncorrectable ECC errors since the driver was loaded", g.ECCUncorrected)
	}
	switch g.Remap {
	case "failed":
		r.problem(process, i, "replace the GPU", "its memory has no spare rows left")
	case "pending":
		r.problem(process, i, "nvidia-smi --gpu-reset", "rows of its memory wait to be replaced")
	}
	if float64(g.FreeBytes) < free*float64(g.MemoryBytes) {
		r.problem(process, i, "nvidia-smi shows which", "%s of %s are free: another process uses it",
			event.Size(g.FreeBytes), event.Size(g.MemoryBytes))
	}
}

// linksOf looks at a GPU's NVLinks: none is down, and it has as many as the others.
func (r *Result) linksOf(process, i int, m *machine.Machine) {
	up := func(g machine.GPU) (n int) {
		for _, l := range g.Links {
			if l.To != "down" {
				n += l.Count
			}
		}
		return n
	}
	const fix = "nvidia-smi nvlink -s; the fabric manager's log"
	most := 0
	for _, g := range m.GPUs {
		most = max(most, up(g))
	}
	for _, l := range m.GPUs[i].Links {
		if l.To == "down" {
			r.problem(process, i, fix, "%d of its NVLinks are down", l.Count)
			return
		}
	}
	if n := up(m.GPUs[i]); n < most {
		r.problem(process, i, fix, "it has %d NVLinks, and others %d", n, most)
	}
}

// clocksOf looks at why a clock is held back.
func (r *Result) clocksOf(process, i int, g machine.GPU) {
	for _, why := range g.Throttled {
		r.problem(process, i, "look at cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
			"its clock is held back: %s", why)
	}
}

// lowClock is the share of the highest clock below which a GPU that has just worked runs too
// slowly. Healthy ones stay above it at their power limit.
const lowClock = 0.6

// reread looks at clocks after work: idle GPUs lower them.
func (r *Result) reread(ctx context.Context, o Options) {
	if o.Reread == nil {
		return
	}
	m, err := o.Reread(ctx)
	if err != nil || len(m.GPUs) < len(r.GPUs) {
		r.problem(o.Process, -1, "deepwell probe", "the driver shows fewer GPUs than before")
		return
	}
	for i := range r.GPUs {
		g, now := &r.GPUs[i], m.GPUs[i]
		old := g.Throttled
		g.ClockMHz, g.TemperatureC = now.ClockNowMHz, now.TemperatureC
		g.Throttled = now.Throttled
		if len(old) == 0 {
			r.clocksOf(o.Process, i, now)
		}
		if now.ECCUncorrected > g.ECCUncorrected {
			g.ECCUncorrected = now.ECCUncorrected
			r.memoryOf(o.Process, i, machine.GPU{ECCUncorrected: now.ECCUncorrected})
		}
		if g.ClockMHz > 0 && float64(g.ClockMHz) < lowClock*float64(g.ClockMaxMHz) {
			r.problem(o.Process, i, "nvidia-smi -q -d CLOCK; nvidia-smi -rgc takes back what was set",
				"its clock is %d MHz under load, of %d", g.ClockMHz, cmp.Or(g.ClockMaxMHz, g.ClockMHz))
		}
	}
}

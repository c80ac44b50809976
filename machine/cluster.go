package machine

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// A Cluster is a number of equal GPUs, arranged in hosts and NVLink domains. The three factors
// multiply to Count: a compiler accepts only clusters in which every domain has equally many
// hosts, and every host equally many devices.
type Cluster struct {
	GPU            GPUModel
	Count          int
	Domains        int // groups of hosts that share NVLink; without NVLink, hosts
	HostsPerDomain int
	DevicesPerHost int
	Note           string // what to know where the count does not fill hosts or domains evenly
}

// maxDevices is ten times the largest cluster anyone plans for; beyond it a count is a slip.
const maxDevices = 1_000_000

// cpuCard stands for one virtual device on the local processor, which runs what a test runs.
func cpuModel() GPUModel {
	return GPUModel{Name: "cpu", Title: "CPU", Arch: "cpu", NVLinkDomain: 1, GPUsPerHost: maxDevices}
}

// ParseCluster reads NxGPU, such as 64xgb200; a bare GPU name means one, and 8xcpu means eight
// devices on the local processor.
func ParseCluster(text string) (Cluster, error) {
	trimmed := strings.TrimSpace(text)
	count, name := 1, trimmed
	digits := strings.TrimLeft(trimmed, "0123456789")
	number := trimmed[:len(trimmed)-len(digits)]
	if rest, ok := cutTimes(digits); ok && number != "" {
		n, err := strconv.Atoi(number)
		if err != nil || n < 1 || n > maxDevices {
			return Cluster{}, clusterError(text, "").
				Because("the number of devices must be 1 to %d", maxDevices)
		}
		count, name = n, strings.TrimSpace(rest)
	}
	if name == "" {
		return Cluster{}, clusterError(text, "")
	}
	if fold(name) == "cpu" {
		return newCluster(cpuModel(), count), nil
	}
	gpu, err := FindGPUModel(name)
	if err != nil {
		return Cluster{}, explain(text, name, count, err)
	}
	// A rack's name without a count means the rack to a person, and one GPU to nobody.
	if rack := rackOf(name); rack > 1 && name == trimmed {
		return Cluster{}, diag.New(diag.ClusterSpec, "%q is a rack of %d GPUs; how many GPUs are meant?",
			text, rack).Try("--cluster %dx%s", rack, gpu.Name)
	}
	return newCluster(gpu, count), nil
}

// rackOf is the number of GPUs in the name of a rack, such as GB200-NVL72; 0 if it names none.
func rackOf(name string) int {
	_, digits, _ := strings.Cut(fold(name), "nvl")
	n, _ := strconv.Atoi(digits) // 0 if there are no digits
	return n
}

// cutTimes takes the sign of multiplication off the front: the letter in either case, or ×.
func cutTimes(s string) (string, bool) {
	s = strings.TrimLeft(s, " ")
	for _, sign := range []string{"x", "X", "×"} {
		if rest, ok := strings.CutPrefix(s, sign); ok {
			return rest, true
		}
	}
	return s, false
}

// explain distinguishes the two mistakes that leave a name unknown: a misspelt GPU, which the fix
// corrects, and an order or sign other than NxGPU.
func explain(text, name string, count int, unknown error) error {
	if swapped := turnAround(text); swapped != "" {
		return clusterError(text, swapped)
	}
	err := diag.From(unknown)
	if near := nearestModel(fold(name), catalogue()); near != "" {
		return err.Try("--cluster %dx%s", count, near)
	}
	if strings.ContainsAny(text, "0123456789") && strings.ContainsAny(text, "*:, ") {
		return clusterError(text, "")
	}
	return err.Try("%s, or cpu", err.Fix)
}

// turnAround finds a number and a known GPU in a text such as b200x8, "8 b200" or b200:8, and
// returns them as NxGPU.
func turnAround(text string) string {
	const decimals, signs = "0123456789", " *:,xX×"
	text = strings.TrimSpace(text)
	front, back := strings.TrimLeft(text, decimals), strings.TrimRight(text, decimals)
	for _, split := range []struct{ number, name string }{
		{text[:len(text)-len(front)], strings.TrimLeft(front, signs)},
		{text[len(back):], strings.TrimRight(back, signs)},
	} {
		count, err := strconv.Atoi(split.number)
		if err != nil || count < 1 || count > maxDevices {
			continue
		}
		if fold(split.name) == "cpu" {
			return newCluster(cpuModel(), count).String()
		}
		if gpu, err := FindGPUModel(split.name); err == nil {
			return newCluster(gpu, count).String()
		}
	}
	return ""
}

func clusterError(text, better string) *diag.Error {
	if better == "" {
		better = "8xb200"
	}
	return diag.New(diag.ClusterSpec, "%q is not a cluster", text).Try("--cluster %s", better)
}

// newCluster arranges the GPUs. Of all equal splits it takes the one with the largest domains,
// since NVLink is many times faster than the network between domains, and among those the one with
// the fullest hosts.
func newCluster(gpu GPUModel, count int) Cluster {
	hostsPerDomain := max(1, gpu.NVLinkDomain/gpu.GPUsPerHost)
	c := Cluster{GPU: gpu, Count: count}
	for devices := min(gpu.GPUsPerHost, count); devices >= 1; devices-- {
		if count%devices != 0 {
			continue
		}
		hosts := count / devices
		inDomain := min(hostsPerDomain, hosts)
		for hosts%inDomain != 0 {
			inDomain--
		}
		if inDomain*devices > c.HostsPerDomain*c.DevicesPerHost {
			c.Domains, c.HostsPerDomain, c.DevicesPerHost = hosts/inDomain, inDomain, devices
		}
	}
	c.Note = c.unevenness()
	return c
}

// unevenness says how the count was split when it fills neither hosts nor domains.
func (c Cluster) unevenness() string {
	perHost, perDomain := c.GPU.GPUsPerHost, max(c.GPU.NVLinkDomain, c.GPU.GPUsPerHost)
	unit, what := perHost, "hosts"
	switch {
	case c.Count <= perHost:
		return ""
	case c.Count > perDomain && perDomain > perHost:
		unit, what = perDomain, "NVLink domains"
	}
	if c.Count%unit == 0 {
		return ""
	}
	below := c.Count / unit * unit
	return fmt.Sprintf("%d %s do not fill %s of %d: taken as %s; %d or %d would fill them",
		c.Count, c.GPU.Title, what, unit, c.shape(), below, below+unit)
}

func (c Cluster) shape() string {
	hosts := plural(c.HostsPerDomain, "host") + " with " + plural(c.DevicesPerHost, "GPU")
	switch {
	case c.GPU.NVLinkDomain <= c.GPU.GPUsPerHost:
		return plural(c.Hosts(), "host") + " with " + plural(c.DevicesPerHost, "GPU")
	case c.Domains == 1:
		return hosts
	}
	return plural(c.Domains, "domain") + " of " + hosts
}

func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// Hosts is the number of hosts.
func (c Cluster) Hosts() int { return c.Domains * c.HostsPerDomain }

// Domain is the number of devices that reach each other without a network: an NVLink domain, or a
// host if there is no NVLink.
func (c Cluster) Domain() int64 {
	if c.GPU.NVLinkDomain <= 1 {
		return int64(c.DevicesPerHost)
	}
	return int64(c.HostsPerDomain * c.DevicesPerHost)
}

// CPU reports whether the devices are the local processor's and no accelerator's.
func (c Cluster) CPU() bool { return c.GPU.Name == "cpu" }

// Arch names the kind of its devices as kernels are chosen for it.
func (c Cluster) Arch() string {
	return c.GPU.Arch
}

// String gives the cluster as the command line spells it.
func (c Cluster) String() string { return fmt.Sprintf("%dx%s", c.Count, c.GPU.Name) }

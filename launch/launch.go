package launch

import (
	"cmp"
	_ "embed"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// A Run is a training run with one process on each host.
type Run struct {
	Name     string // of the job
	Hosts    int
	GPUs     int    // of each host
	Recipe   string // file, as the hosts see it
	Set      []string
	Plan     string
	Key      string // file of the secret that all processes share
	Port     int    // 0 is 7000
	Folder   string // file system that all hosts share: recipe, plan, data, run folder (JobSet)
	Image    string // of the container (JobSet)
	Volume   string // claim of Folder (JobSet)
	Restarts int    // after which the run fails
}

//go:embed slurm.sh.tmpl
var slurm string

//go:embed jobset.yaml.tmpl
var jobset string

// schedulers are the templates by the scheduler's name, and what they need of a run.
var schedulers = map[string]struct {
	text  string
	needs func(Run) string // the flag that is missing; "" if none is
}{
	"slurm": {slurm, func(Run) string { return "" }},
	"jobset": {jobset, func(r Run) string {
		switch "" {
		case r.Image:
			return "--image"
		case r.Volume:
			return "--volume"
		}
		return ""
	}},
}

// defaultPort is where processes listen, one on each host.
const defaultPort = 7000

// word is what may stand in a script without quotes.
var word = regexp.MustCompile(`^[A-Za-z0-9._/=,:@+-]+$`)

// Script writes what the scheduler of a name takes.
func Script(scheduler string, r Run) (string, error) {
	s, ok := schedulers[scheduler]
	if !ok {
		return "", diag.New(diag.BadUsage, "there is no scheduler %q", scheduler).At("--to").
			Try("--to local, --to slurm, or --to jobset")
	}
	if flag := s.needs(r); flag != "" {
		return "", diag.New(diag.BadUsage, "a %s needs %s", scheduler, flag).
			Try("deepwell launch --to %s ... %s VALUE", scheduler, flag)
	}
	words := slices.Concat([]string{r.Name, r.Recipe, r.Plan, r.Key}, r.Set)
	for _, one := range append(words, r.Image, r.Volume, r.Folder) {
		if one != "" && !word.MatchString(one) {
			return "", diag.New(diag.BadUsage, "%q cannot stand in a script", one).
				Try("use letters, digits and . _ / = , : @ + -")
		}
	}
	r.Name, r.Port = dnsName(r.Name), cmp.Or(r.Port, defaultPort)
	again, final := statuses()
	// A package of templates would keep every method of every type in the binary: 3 MB.
	return strings.NewReplacer("{{.Name}}", r.Name, "{{.Hosts}}", strconv.Itoa(r.Hosts),
		"{{.Last}}", strconv.Itoa(r.Hosts-1), "{{.GPUs}}", strconv.Itoa(r.GPUs),
		"{{.Port}}", strconv.Itoa(r.Port), "{{.Restarts}}", strconv.Itoa(r.Restarts),
		"{{.Recipe}}", r.Recipe, "{{.Plan}}", r.Plan, "{{.Key}}", r.Key, "{{.Image}}", r.Image,
		"{{.Volume}}", r.Volume, "{{.Folder}}", r.Folder, "{{.Set}}", sets(r.Set),
		"{{.Again}}", again, "{{.Final}}", final).Replace(s.text), nil
}

// statuses lists the exit statuses after which a run is started again, and those after which it is
// not.
func statuses() (again, final string) {
	var lists [2][]string
	for c := diag.Failed; c <= diag.Stalled; c++ {
		which := 1
		if c.Restart() {
			which = 0
		}
		lists[which] = append(lists[which], strconv.Itoa(int(c)))
	}
	return strings.Join(lists[0], " | "), strings.Join(lists[1], ", ")
}

// sets are the flags of keys that a run overrides.
func sets(list []string) string {
	var b strings.Builder
	for _, one := range list {
		b.WriteString(" --set " + one)
	}
	return b.String()
}

// maxName leaves room for what a JobSet adds to the names of pods, which have at most 63 letters.
const maxName = 40

var unnamed = regexp.MustCompile(`[^a-z0-9-]+`)

// dnsName is a name as Kubernetes takes it; Slurm takes it, too.
func dnsName(name string) string {
	name = strings.Trim(unnamed.ReplaceAllString(strings.ToLower(name), "-"), "-")
	if name == "" || name[0] < 'a' || name[0] > 'z' { // RFC 1035: a letter first
		name = "run-" + name
	}
	return strings.Trim(name[:min(len(name), maxName)], "-")
}

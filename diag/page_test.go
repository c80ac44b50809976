package diag

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
)

func TestPageIsWritten(t *testing.T) {
	golden.Compare(t, filepath.Join("..", "docs", "errors.md"), []byte(page()))
}

// page prints every code with its exit class, meaning and an example, as docs/errors.md.
func page() string {
	var b strings.Builder
	b.WriteString("# Error codes\n\n" +
		"Printed from `diag/codes.tsv`; `go test ./diag -update` writes it.\n\n" +
		"A code marked (warning) never ends a command. Others may come with a warning as well, where " +
		"a\ncommand can continue.\n\n")
	b.WriteString("## Exit status\n\n" +
		"What the exit status of `deepwell train` tells a launcher. If processes of a run end with\n" +
		"different statuses, one that no restart mends counts first; under Slurm the highest does, " +
		"which is\nall that srun tells. `deepwell launch` goes by this table.\n" +
		"\n| status | meaning | start all processes again |\n|---|---|---|\n| 0 | done | no |\n")
	for _, c := range classes {
		again := "no"
		if c.Restart() {
			again = "yes: they go on from the newest checkpoint"
		}
		fmt.Fprintf(&b, "| %d | %s | %s |\n", int(c.Class), c.meaning, again)
	}
	b.WriteString("| (a signal) | killed, for instance by the kernel for want of memory, " +
		"or crashed | yes: they go on from the newest checkpoint |\n\n## Codes\n\n")
	b.WriteString("| code | exit | meaning | example |\n|---|---|---|---|\n")
	for _, r := range catalogue {
		fmt.Fprintf(&b, "| %s | %d | %s | %s |\n", r.code, r.class, r.meaning, r.example)
	}
	return b.String()
}

// classes are the exit statuses of failures, with their meanings.
var classes = []struct {
	Class
	meaning string
}{
	{Failed, "failed"},
	{Usage, "the command, the recipe or the plan is not well formed"},
	{NoFit, "the plan does not fit the machine"},
	{Numerics, "a numerics guard stopped the run"},
	{Stalled, "a process, a GPU or the network was lost, or nothing moved any more"},
	{Interrupted, "stopped by SIGINT, and saved"},
	{Terminated, "stopped by SIGTERM or SIGHUP, and saved"},
}

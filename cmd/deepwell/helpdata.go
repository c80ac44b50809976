package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// describe gives a command and those below it as data, so that tools can learn the command line
// without parsing text.
func describe(cmd *cobra.Command) commandHelp {
	h := commandHelp{Name: cmd.Name(), Use: cmd.UseLine(), Short: cmd.Short}
	for line := range strings.SplitSeq(cmd.Example, "\n") {
		if line = strings.TrimSpace(line); line != "" {
			h.Examples = append(h.Examples, line)
		}
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		h.Flags = append(h.Flags, flagHelp{f.Name, f.DefValue, f.Usage})
	})
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			h.Commands = append(h.Commands, describe(c))
		}
	}
	return h
}

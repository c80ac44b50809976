package main

import (
	_ "embed" // for help.txt
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpText has a section for each command: its usage line behind a #, a line that says what it
// does, paragraphs that say more, and examples, which are indented.
//
//go:embed help.txt
var helpText string

// documented fills in what help.txt says of a command, which is named with the one above it.
func documented(name string, cmd *cobra.Command) *cobra.Command {
	for section := range strings.SplitSeq(strings.TrimPrefix(helpText, "# "), "\n# ") {
		usage, text, _ := strings.Cut(section, "\n")
		if usage != name && !strings.HasPrefix(usage, name+" ") || cmd.Use != "" {
			continue
		}
		cmd.Use = usage[strings.LastIndex(name, " ")+1:]
		cmd.Short, text, _ = strings.Cut(text, "\n")
		at := strings.LastIndex("\n"+text, "\n\n  ") // every command has an example
		cmd.Long, cmd.Example = strings.TrimSpace(text[:at]), strings.Trim(text[at:], "\n")
	}
	return cmd
}

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

package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
)

// data groups the commands about text and tokens.
func (a *app) data() *cobra.Command {
	return group("data", a.dataPeek(), a.dataTokenizer())
}

func (a *app) dataPeek() *cobra.Command {
	job := deepwell.PeekJob{}
	var format, source string
	var ids bool
	cmd := documented("data peek", &cobra.Command{
		Args: one("path"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if job.Recipe = ""; strings.HasSuffix(args[0], ".toml") {
				for _, name := range []string{"tokenizer", "seq", "template", "format", "end", "column"} {
					if cmd.Flags().Changed(name) {
						return usage(cmd, "--%s is the recipe's: --set changes it there", name)
					}
				}
				job.Recipe, job.Source.Name = args[0], source
			} else if source != "" || len(job.Set) > 0 {
				return usage(cmd, "--source and --set are for a run.toml")
			} else if job.Tokenizer == "" {
				return usage(cmd, "peek needs --tokenizer: a tokenizer.json, or a folder with one")
			}
			job.Source.Path, job.Source.Format = args[0], data.Format(format)
			return serve(a, cmd, (*deepwell.Env).Peek, job, func(p *deepwell.PeekResult) error {
				a.showStats(p)
				if ids {
					return a.showIDs(p)
				}
				a.showRow(p)
				return nil
			})
		},
	})
	f := cmd.Flags()
	f.StringVar(&job.Tokenizer, "tokenizer", "",
		"a tokenizer.json or SentencePiece .model, or a folder with one")
	f.IntVar(&job.Seq, "seq", 128, "tokens per sequence")
	f.Int64Var(&job.Row, "row", 0, "index of the sequence, in file order, from 0")
	f.StringVar(&job.Source.Template, "template", "", "chat template: "+
		strings.Join(data.Templates(), ", ")+", builtin (default: the model's own, beside the tokenizer)")
	f.StringVar(&format, "format", "",
		strings.Join(data.Formats(), ", ")+" (default: inferred from the file name)")
	f.StringToStringVar((*map[string]string)(&job.Source.Columns), "column", nil,
		"name a column, such as instruction=question,output=answer")
	f.StringVar(&job.End, "end", "", "end-of-document token (default: the tokenizer's)")
	f.StringVar(&source, "source", "", "of a run.toml, the name of one of its sources")
	f.StringArrayVar(&job.Set, "set", nil, "of a run.toml, override a key: --set KEY=VALUE")
	f.BoolVar(&ids, "ids", false, "print one token per line, with its id")
	return cmd
}

// showStats prints the size of the source.
func (a *app) showStats(p *deepwell.PeekResult) {
	if p.Run != nil {
		a.showRun(p.Run)
	}
	s := p.Source
	fmt.Fprintf(a.stdout, "%s, %s, %s", human.Count(s.Files, "file"),
		human.Count(s.Documents, "document"), human.Count(s.Tokens, "token"))
	if s.Bytes > 0 {
		fmt.Fprintf(a.stdout, " from %s (%.3f per byte)", event.Size(s.Bytes),
			float64(s.Tokens)/float64(s.Bytes))
	}
	fmt.Fprintf(a.stdout, ", %s of %d\n", human.Count(s.Sequences, "sequence"), p.Seq)
	if !slices.Equal(s.Kinds, []string{chat.PlainText.String()}) && len(s.Kinds) > 0 {
		fmt.Fprintf(a.stdout, "rows: %s\n", strings.Join(s.Kinds, ", "))
	}
	if s.Template != "" {
		fmt.Fprintf(a.stdout, "chat template: %s\n", s.Template)
	}
	documents := int64(p.Tokens[len(p.Tokens)-1].Document) + 1
	fmt.Fprintf(a.stdout, "sequence %d: %s, loss on %d of %s\n\n", p.Row,
		human.Count(documents, "document"), p.Count, human.Count(int64(p.Seq), "label"))
}

// showRun prints what a run takes from each of its sources.
func (a *app) showRun(run *deepwell.PeekRun) {
	fmt.Fprintf(a.stdout, "%s of %s go through the data %.3g times\n",
		human.Count(int64(run.Steps), "step"), human.Count(int64(run.Batch), "sequence"), run.Epochs)
	for i, s := range append(slices.Clone(run.Sources), run.Eval...) {
		fmt.Fprintf(a.stdout, "  %s: %s, %s", s.Name, human.Count(s.Documents, "document"),
			human.Count(s.Sequences, "sequence"))
		if s.Share > 0 {
			fmt.Fprintf(a.stdout, ", %.3g %% of the mixture", 100*s.Share)
		}
		if s.HeldOut > 0 {
			fmt.Fprintf(a.stdout, ", %d more held out for eval", s.HeldOut)
		}
		if i >= len(run.Sources) {
			fmt.Fprint(a.stdout, ", for eval")
		}
		fmt.Fprintln(a.stdout)
	}
}

// showIDs prints a table of the tokens.
func (a *app) showIDs(p *deepwell.PeekResult) error {
	return a.table("DOCUMENT\tPOSITION\tID\tLOSS\tTEXT", func(w io.Writer) {
		for _, t := range p.Tokens {
			learned := "-"
			if t.Learned {
				learned = "yes"
			}
			fmt.Fprintf(w, "%d\t%d\t%d\t%s\t%q\n", t.Document, t.Position, t.ID, learned, t.Text)
		}
	})
}

// showRow prints the text of the tokens.
func (a *app) showRow(p *deepwell.PeekResult) {
	open, shut := "[", "]"
	if f, ok := a.stdout.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		open, shut = "\x1b[2m", "\x1b[0m"
	}
	var b strings.Builder
	for i, t := range p.Tokens {
		first := i == 0 || t.Document != p.Tokens[i-1].Document
		if first {
			fmt.Fprintf(&b, "%sdocument %d:\n", strings.Repeat("\n", min(i, 2)), t.Document)
		} else if !strings.HasSuffix(p.Tokens[i-1].Text, "\n") {
			b.WriteByte('|')
		}
		if !t.Learned && (first || p.Tokens[i-1].Learned) {
			b.WriteString(open)
		}
		b.WriteString(visible(t.Text))
		last := i+1 == len(p.Tokens) || p.Tokens[i+1].Document != t.Document
		if !t.Learned && (last || p.Tokens[i+1].Learned) {
			b.WriteString(shut)
		}
	}
	fmt.Fprintln(a.stdout, b.String())
}

// visible shows what a terminal would not show, or would obey.
func visible(text string) string {
	if text == "" {
		return "‥"
	}
	var b strings.Builder
	for _, r := range text {
		switch {
		case r == '\n':
			b.WriteString("↵\n")
		case r == '\t':
			b.WriteString("→")
		case r < ' ' || r == 0x7f || 0x80 <= r && r < 0xa0 || !strconv.IsGraphic(r):
			quoted := strconv.QuoteRuneToASCII(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

func (a *app) dataTokenizer() *cobra.Command {
	job := deepwell.TokenizerJob{}
	cmd := documented("data tokenizer", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, "data tokenizer needs the path of some text")
			}
			for _, path := range args {
				job.Sources = append(job.Sources, data.Source{Path: path})
			}
			show := func(r *deepwell.TokenizerResult) error {
				fmt.Fprintf(a.stdout, "%s: %s from %s, %s\n", r.Path,
					human.Count(int64(r.Tokens), "token"), human.Count(r.Texts, "text"), event.Size(r.Bytes))
				if r.Tokens < job.Vocab {
					fmt.Fprintf(a.stdout, "the text yields no more tokens; %d were requested\n", job.Vocab)
				}
				return nil
			}
			return serve(a, cmd, (*deepwell.Env).TrainTokenizer, job, show)
		},
	})
	f := cmd.Flags()
	f.IntVar(&job.Vocab, "vocab", 4096, "vocabulary size, at most")
	f.StringArrayVar(&job.Special, "special", []string{"<|endoftext|>"},
		"special tokens; the first one ends a document")
	f.StringVarP(&job.Out, "output", "o", "tokenizer.json",
		"file to write, with tokenizer_config.json beside it")
	return cmd
}

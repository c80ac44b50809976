package program

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"golang.org/x/tools/txtar"

	"github.com/deepwell/deepwell/diag"
)

// version of the file format; a change that old readers would misread raises it.
const version = 1

const magic = "deepwell program "

// marker is a line that would begin a new section of the archive.
var marker = regexp.MustCompile(`(?m)^-- .+ --$`)

// Marshal writes the program as its file. The same program gives the same bytes.
func (p *Program) Marshal() ([]byte, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	js, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return nil, diag.New(diag.ProgramInvalid, "the program cannot be written").Wrap(err)
	}
	a := &txtar.Archive{Comment: fmt.Appendf(nil, "%s%d\n", magic, version)}
	a.Files = append(a.Files, txtar.File{Name: "program.json", Data: js})
	for _, m := range p.Modules {
		if marker.MatchString(m.Text) {
			return nil, diag.New(diag.ProgramInvalid, "the text has a line like \"-- name --\"").
				At("module %s", m.Name)
		}
		a.Files = append(a.Files, txtar.File{Name: m.Name + ".mlir", Data: []byte(m.Text)})
	}
	return txtar.Format(a), nil
}

// plainNumbers converts flags' JSON numbers to int64 where they are integers: XLA distinguishes 1
// from 1.0.
func plainNumbers(flags map[string]any) {
	for name, value := range flags {
		n, ok := value.(json.Number)
		if !ok {
			continue
		}
		if whole, err := n.Int64(); err == nil {
			flags[name] = whole
		} else if real, err := n.Float64(); err == nil {
			flags[name] = real
		}
	}
}

// Parse reads what Marshal writes, and refuses anything else by name.
func Parse(data []byte) (*Program, error) {
	first, _, _ := bytes.Cut(data, []byte("\n"))
	tag, ok := strings.CutPrefix(strings.TrimSpace(string(first)), magic)
	if !ok {
		return nil, diag.New(diag.ProgramFormat, "this is not a program file: the first line is not %q",
			fmt.Sprint(magic, version))
	}
	if tag != fmt.Sprint(version) {
		return nil, diag.New(diag.ProgramVersion, "the program has version %q; this binary reads %d",
			tag, version)
	}
	texts := map[string]string{}
	for _, f := range txtar.Parse(data).Files {
		if _, twice := texts[f.Name]; twice {
			return nil, diag.New(diag.ProgramFormat, "section %s stands twice", f.Name)
		}
		texts[f.Name] = string(f.Data)
	}
	js, ok := texts["program.json"]
	if !ok {
		return nil, diag.New(diag.ProgramFormat, "no program.json inside")
	}
	p := &Program{}
	dec := json.NewDecoder(strings.NewReader(js))
	dec.DisallowUnknownFields()
	dec.UseNumber()
	if err := dec.Decode(p); err != nil {
		return nil, diag.New(diag.ProgramFormat, "program.json cannot be read").Wrap(err)
	}
	for i := range p.Modules {
		plainNumbers(p.Modules[i].Flags)
		text, ok := texts[p.Modules[i].Name+".mlir"]
		if !ok {
			return nil, diag.New(diag.ProgramFormat, "no text for module %s", p.Modules[i].Name)
		}
		p.Modules[i].Text = text
	}
	if len(texts) != len(p.Modules)+1 {
		return nil, diag.New(diag.ProgramFormat, "the file has %d sections for %d modules",
			len(texts), len(p.Modules))
	}
	return p, p.Validate()
}

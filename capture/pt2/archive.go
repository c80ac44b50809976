package pt2

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/safedir"
)

// The codes that this package's errors carry.
const (
	codeFormat = diag.BadInput   // an archive contradicts the format or itself
	codeFile   = diag.FileError  // a file cannot be read
	codeClosed = diag.BufferGone // an archive was used after Close
	codeCaller = diag.BadUsage   // an argument that no archive can satisfy
	codeType   = diag.WeightType // numbers of a tensor cannot be float32
)

const saveAgain = "export the module again: " +
	"torch.export.save(torch.export.export(model, args), path)"

func damaged(format string, args ...any) *diag.Error {
	return diag.New(codeFormat, format, args...).
		Try("the archive is damaged or not of torch.export.save: export the module again")
}

// An Archive is an open file.
type Archive struct {
	Program *Program

	name    string // as errors call it
	zip     *zipFile
	file    *os.File  // nil for an archive in memory
	tensors []*Tensor // sorted by name
}

// Open reads the program and the list of tensors, and leaves the tensors' numbers in the file.
func Open(path string) (*Archive, error) {
	f, info, err := safedir.Peek(path, os.OpenFile)
	if err == nil && info.IsDir() {
		_ = f.Close()
		err = diag.New(codeFormat, "not a plain file but a folder").
			Try("give the file that torch.export.save wrote")
	}
	if err != nil {
		return nil, locate(err, path)
	}
	a, err := read(path, f, info.Size())
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	a.file = f
	return a, nil
}

// Parse reads an archive in memory, which must not change; name is what errors call it.
func Parse(name string, data []byte) (*Archive, error) {
	return read(name, bytes.NewReader(data), int64(len(data)))
}

// Close ends the use of the file.
func (a *Archive) Close() error {
	if a.file == nil {
		return nil
	}
	if err := a.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return diag.New(codeFile, "cannot close %s", a.name).Wrap(err)
	}
	return nil
}

// locate names the file in an error, and gives a code to one that has none.
func locate(err error, where string) *diag.Error {
	e, ok := errors.AsType[*diag.Error](err)
	if !ok {
		e = diag.New(codeFile, "cannot read %s", where).Wrap(err)
	}
	if e.Where == "" {
		return e.At("%s", where)
	}
	return e.At("%s %s", where, e.Where)
}

func read(name string, r io.ReaderAt, size int64) (*Archive, error) {
	a := &Archive{name: name}
	z, err := openZip(r, size)
	if err == nil {
		a.zip = z
		err = a.load()
	}
	if err != nil {
		return nil, locate(err, name)
	}
	return a, nil
}

// Members of an archive, below its root folder.
const (
	programName   = "models/model.json"
	weightsFolder = "data/weights/"
	constsFolder  = "data/constants/"
	weightsName   = weightsFolder + "model_weights_config.json"
	constsName    = constsFolder + "model_constants_config.json"
	// maxText bounds a member that is JSON. The program of 32 layers has 4 MB.
	maxText = 100_000_000
)

func (a *Archive) load() error {
	root, err := findRoot(a.zip.names())
	if err != nil {
		return err
	}
	for _, must := range []struct{ member, value string }{
		{"archive_format", "pt2"}, {"archive_version", "0"}, {"byteorder", "little"}} {
		text, err := a.zip.text(root+must.member, 64)
		if err != nil {
			return err
		}
		if text != must.value {
			return damaged("%s of the archive is %s, not %s", must.member, human.Quote(text), must.value)
		}
	}
	text, err := a.zip.text(root+programName, maxText)
	if err != nil {
		return err
	}
	if a.Program, err = parseProgram(text); err != nil {
		return inMember(err, programName)
	}
	seen := map[string]bool{}
	for _, c := range []struct{ config, folder string }{
		{weightsName, weightsFolder}, {constsName, constsFolder}} {
		text, err := a.zip.text(root+c.config, maxText)
		if err != nil {
			return err
		}
		list, err := parseConfig(text, a.zip, root+c.folder)
		if err != nil {
			return inMember(err, c.config)
		}
		for _, t := range list {
			if seen[t.Name] {
				return damaged("tensor %s stands twice", human.Quote(t.Name)).At("%s", c.config)
			}
			seen[t.Name] = true
			t.archive = a
		}
		a.tensors = append(a.tensors, list...)
	}
	slices.SortFunc(a.tensors, func(s, t *Tensor) int { return strings.Compare(s.Name, t.Name) })
	return a.checkInputs()
}

// inMember names the member of an archive that an error is about.
func inMember(err error, member string) error {
	e, ok := errors.AsType[*diag.Error](err)
	if !ok {
		e = damaged("%s is not well formed", member).Because("%s", err)
	}
	if e.Where != "" {
		return e.At("%s: %s", member, e.Where)
	}
	return e.At("%s", member)
}

// findRoot gives the folder that the members are in: the stem of the file's first name.
func findRoot(names []string) (string, error) {
	root, others := "", ""
	for _, name := range names {
		folder, member, _ := strings.Cut(name, "/")
		switch {
		case member == programName && root != "":
			return "", damaged("the archive holds two programs")
		case member == programName:
			root = folder + "/"
		case member == "data.pkl":
			return "", diag.New(codeFormat, "this is what torch.save writes: a pickle and tensors").
				Because("a pickle can run code and is not read").Try("%s", saveAgain)
		case name == "serialized_exported_program.json":
			return "", diag.New(codeFormat, "torch older than 2.8 wrote this archive").Try("%s", saveAgain)
		case strings.HasPrefix(member, "models/") || strings.HasPrefix(member, "data/aotinductor/"):
			others = member
		}
	}
	if root == "" && others != "" {
		return "", damaged("the archive holds %s and no %s", human.Quote(others), programName).
			Because("it was made for another purpose than export").Try("%s", saveAgain)
	}
	if root == "" {
		return "", damaged("the archive holds no program")
	}
	return root, nil
}

// checkInputs demands that each parameter, buffer and constant of the program is stored, as the
// program describes it.
func (a *Archive) checkInputs() error {
	for _, in := range a.Program.Inputs {
		if in.Kind != Parameter && in.Kind != Buffer && in.Kind != TensorConstant {
			continue
		}
		t, err := a.Tensor(in.Name)
		if err != nil {
			return damaged("the program has a %s %s, which is not stored", in.Kind, human.Quote(in.Name))
		}
		ref, _ := in.Arg.(Ref)
		v := a.Program.Graph.Values[string(ref)]
		same := v.Type == t.Type && len(v.Dims) == len(t.Dims)
		for i := 0; same && i < len(t.Dims); i++ {
			n, fixed := v.Dims[i].Const()
			same = fixed && n == t.Dims[i]
		}
		if !same {
			return damaged("%s is stored as %v; the program says %s%v", human.Quote(in.Name), t.Shape(),
				v.Type, v.Dims)
		}
	}
	return nil
}

// Tensor finds a parameter, buffer or constant by its full name.
func (a *Archive) Tensor(name string) (*Tensor, error) {
	i, ok := slices.BinarySearchFunc(a.tensors, name, func(t *Tensor, name string) int {
		return strings.Compare(t.Name, name)
	})
	if !ok {
		return nil, diag.New(codeCaller, "the archive has no tensor %s", human.Quote(name)).
			At("%s", a.name)
	}
	return a.tensors[i], nil
}

// Tensors lists parameters, buffers and constants by name.
func (a *Archive) Tensors() []*Tensor { return slices.Clone(a.tensors) }

// Digest names the program and the tensors by their contents, whatever the file is called. The
// numbers are not read: the directory of the archive has a checksum of each storage. Sample inputs,
// which are a pickle, do not count.
func (a *Archive) Digest() string {
	hash := sha256.New()
	names := slices.Sorted(maps.Keys(a.zip.entries))
	for _, name := range names {
		_, member, _ := strings.Cut(name, "/") // the folder is called like the file was once
		if e := a.zip.entries[name]; member == programName || strings.HasPrefix(member, "data/") &&
			!strings.HasPrefix(member, "data/sample_inputs/") {
			fmt.Fprintf(hash, "%q %d %08x\n", member, e.size, e.crc)
		}
	}
	return hex.EncodeToString(hash.Sum(nil))
}

// Tied lists the groups of names that are one tensor: they share storage, offset and shape. The
// names of a group are in the order of the program's inputs. Where weights were not stored (meta
// device) it cannot be known, and no group is listed.
func (a *Archive) Tied() [][]string {
	type place struct{ storage, view string }
	places := map[place][]string{}
	var order []place
	for _, in := range a.Program.Inputs {
		t, err := a.Tensor(in.Name)
		if err != nil || t.Meta || t.Shape().Elements() == 0 ||
			in.Kind != Parameter && in.Kind != Buffer && in.Kind != TensorConstant {
			continue
		}
		p := place{t.Storage, dtype.List(append([]int64{t.Offset}, slices.Concat(t.Dims, t.Strides)...)) +
			t.Type.String()}
		if places[p] == nil {
			order = append(order, p)
		}
		places[p] = append(places[p], in.Name)
	}
	var groups [][]string
	for _, p := range order {
		if len(places[p]) > 1 {
			groups = append(groups, places[p])
		}
	}
	return groups
}

package safetensors

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// The codes that this package's errors carry.
const (
	codeFormat = diag.BadInput   // a file or folder contradicts the format or itself
	codeFile   = diag.FileError  // a file cannot be read or written
	codeClosed = diag.BufferGone // a set was used after Close
	codeCaller = diag.BadUsage   // an argument that no file can satisfy
)

const (
	// prefixBytes is the length that every file starts with.
	prefixBytes = 8
	// maxHeader is the reference library's own bound (MAX_HEADER_SIZE).
	maxHeader = 100_000_000
	// maxName bounds names, which are printed in messages and logs; the longest in
	// published models have about 150 bytes.
	maxName = 4096
	// maxKeys bounds the metadata's keys: a map of the eight million that fit into a header
	// took 1.4 GB. Published files have at most a few hundred.
	maxKeys = 1 << 16
	// minEntry is the shortest text of one tensor in a header, with an empty name and shape:
	// it turns the header's length into a bound for the number of tensors.
	minEntry = len(`"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}`)

	metadataKey = "__metadata__"
)

// An entry is what a header says of one tensor.
type entry struct {
	name       string
	shape      dtype.Shape
	begin, end int64 // within the file's data
	shard      *shard
}

func damaged(format string, args ...any) *diag.Error {
	return diag.New(codeFormat, format, args...).
		Try("the file is damaged or not safetensors: fetch or write it again")
}

// within puts a tensor's name before what an error says.
func within(err error, name string) error {
	e, ok := errors.AsType[*diag.Error](err)
	if !ok {
		e = damaged("%s", err)
	}
	c := *e
	c.What = "tensor " + human.Quote(name) + ": " + e.What
	return &c
}

// parseHeader reads the JSON text of a header whose file holds data bytes after it. The entries
// come back sorted by name.
func parseHeader(text string, data int64) ([]entry, map[string]string, error) {
	if !utf8.ValidString(text) {
		return nil, nil, damaged("the header is not UTF-8")
	}
	if !strings.HasPrefix(text, "{") {
		return nil, nil, damaged("the header does not begin with {")
	}
	p := headerParser{Scanner: strictjson.Scan(text)}
	// The guess only saves allocations; it is bounded by the text that was really read.
	guess := min(strings.Count(text, `"data_offsets"`), len(text)/minEntry+1)
	p.entries = make([]entry, 0, guess)
	p.dims = make([]int64, 0, 2*guess)
	err := p.Object(p.member)
	if err == nil && strings.TrimLeft(p.Rest(), " ") != "" {
		err = p.Fail("only spaces may follow the header's object")
	}
	if err != nil {
		if _, ok := errors.AsType[*diag.Error](err); !ok {
			err = damaged("the header is not well formed").Because("%s", err)
		}
		return nil, nil, err
	}
	if err := cover(p.entries, data); err != nil {
		return nil, nil, err
	}
	lists.Sort(p.entries, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	for i := 1; i < len(p.entries); i++ {
		if p.entries[i].name == p.entries[i-1].name {
			return nil, nil, damaged("the name %s stands twice", human.Quote(p.entries[i].name))
		}
	}
	return p.entries, p.metadata, nil
}

type headerParser struct {
	strictjson.Scanner
	entries  []entry
	dims     []int64 // all shapes, one after the other
	metadata map[string]string
}

func (p *headerParser) member(name string) error {
	if name == metadataKey {
		return p.readMetadata()
	}
	if err := checkName(name); err != nil {
		return err
	}
	e, err := p.tensor()
	if err != nil {
		return within(err, name)
	}
	e.name = name
	p.entries = append(p.entries, e)
	return nil
}

// checkName refuses names that a person could not read in a message or that could forge a log.
func checkName(name string) error {
	switch {
	case name == "":
		return damaged("a tensor has an empty name")
	case len(name) > maxName:
		return damaged("a name has %d bytes; at most %d are read", len(name), maxName)
	case strings.ContainsFunc(name, unicode.IsControl):
		return damaged("the name %s holds a control character", human.Quote(name))
	case !utf8.ValidString(name):
		return damaged("the name %s is not UTF-8", human.Quote(name))
	}
	return nil
}

func (p *headerParser) readMetadata() error {
	if p.metadata != nil {
		return damaged("%s stands twice", metadataKey)
	}
	p.metadata = map[string]string{}
	err := p.Object(func(key string) error {
		if _, twice := p.metadata[key]; twice {
			return damaged("%s holds %s twice", metadataKey, human.Quote(key))
		}
		if len(p.metadata) == maxKeys {
			return damaged("%s holds more than %d keys", metadataKey, maxKeys)
		}
		value, err := p.Text()
		p.metadata[key] = value
		return err
	})
	if _, ok := errors.AsType[*diag.Error](err); err != nil && !ok {
		return damaged("%s is not an object of strings", metadataKey).Because("%s", err)
	}
	return err
}

// tensor reads the value of one name.
func (p *headerParser) tensor() (entry, error) {
	var e entry
	seen := make([]string, 0, 4)
	err := p.Object(func(key string) error {
		if slices.Contains(seen, key) {
			return damaged("%s stands twice", key)
		}
		seen = append(seen, key)
		switch key {
		case "dtype":
			name, err := p.Text()
			if err == nil {
				e.shape.Type, err = typeNamed(name)
			}
			return err
		case "shape":
			return p.shape(&e)
		case "data_offsets":
			return p.offsets(&e)
		}
		return damaged("%s is not a field of a tensor", human.Quote(key))
	})
	switch {
	case err != nil:
		return e, err
	case len(seen) < 3:
		return e, damaged("dtype, shape or data_offsets is missing")
	}
	size, err := span(e.shape)
	switch {
	case err != nil:
		return e, err
	case e.end < e.begin:
		return e, damaged("it ends at %d, before it begins at %d", e.end, e.begin)
	case e.end-e.begin != size:
		return e, damaged("%v takes %d bytes, its offsets %d to %d hold %d",
			e.shape, size, e.begin, e.end, e.end-e.begin)
	}
	return e, nil
}

func (p *headerParser) shape(e *entry) error {
	first := len(p.dims)
	err := p.Array(func() error {
		if len(p.dims)-first > maxRank { // span says what is wrong with it
			return damaged("a shape of more than %d dimensions", maxRank)
		}
		n, err := p.Integer()
		p.dims = append(p.dims, n)
		return err
	})
	e.shape.Dims = p.dims[first:len(p.dims):len(p.dims)]
	return err
}

func (p *headerParser) offsets(e *entry) error {
	var pair [2]int64
	n := 0
	err := p.Array(func() (err error) {
		if n == len(pair) {
			return damaged("data_offsets holds more than two numbers")
		}
		pair[n], err = p.Integer()
		n++
		return err
	})
	if err == nil && n < len(pair) {
		return damaged("data_offsets holds %d numbers, not two", n)
	}
	e.begin, e.end = pair[0], pair[1]
	return err
}

// cover demands that the tensors fill the data from its first byte to its last, each byte once.
func cover(entries []entry, data int64) error {
	lists.Sort(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	at := int64(0)
	for i, e := range entries {
		switch {
		case e.begin > at:
			return within(damaged("the %d bytes before it belong to no tensor", e.begin-at), e.name)
		case e.begin < at:
			return within(damaged("it overlaps tensor %s", human.Quote(entries[i-1].name)), e.name)
		}
		at = e.end
	}
	switch {
	case at > data:
		return diag.New(codeFormat, "the file is truncated: %d of %d data bytes are there", data, at).
			Try("the download or copy did not finish: fetch the file again")
	case at < data:
		return damaged("the last %d bytes belong to no tensor", data-at)
	}
	return nil
}

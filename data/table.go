package data

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/parquet"
)

// readTable takes every row of a csv or tsv as an item. The first line names the columns.
func readTable(ctx context.Context, f *file, emit func(item) error) error {
	in, r, done, err := unpack(ctx, f)
	if err != nil {
		return err
	}
	defer done()
	bounded := &bounded{in: r, limit: f.limit}
	table := csv.NewReader(bounded)
	if table.Comma = ','; f.format == TSV {
		table.Comma = '\t'
	}
	var header []string
	for {
		bounded.taken = 0
		record, err := table.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		line := 0
		if err == nil {
			line, _ = table.FieldPos(0)
		}
		at := place{f.path, int64(line)}
		if err == nil {
			err = textual(record, at)
		}
		if err != nil {
			return f.badTable(err, bounded)
		}
		if header == nil {
			record[0] = strings.TrimPrefix(record[0], "\ufeff") // some editors mark UTF-8 so
			if header = record; len(header) == 1 && strings.ContainsAny(header[0], ";\t|") {
				return diag.New(diag.DataFormat, "%s has one column, %q", f.name, header[0]).At("%s", at).
					Try("separate the columns with commas, or with tabs in a .tsv")
			}
			continue
		}
		it := item{where: at, read: in.n, row: chat.Row{Text: map[string]string{}}}
		for i, text := range record {
			it.row.Text[header[i]] = text
		}
		if err := emit(it); err != nil {
			return err
		}
	}
}

// textual refuses a record that is not UTF-8.
func textual(record []string, at place) error {
	for i, text := range record {
		if !utf8.ValidString(text) {
			return diag.New(diag.DataFormat, "column %d is not UTF-8", i+1).At("%s", at).
				Try("convert the file: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW")
		}
	}
	return nil
}

// badTable explains an error of reading a table.
func (f *file) badTable(err error, in *bounded) error {
	if _, ok := errors.AsType[*diag.Error](err); ok {
		return err
	}
	bad, ok := errors.AsType[*csv.ParseError](err)
	if ok {
		err = bad.Err
	}
	switch {
	case errors.Is(err, errTooLong):
		return f.tooLong(place{file: f.path}, in.taken)
	case !ok:
		return packed(f, err)
	}
	e := diag.New(diag.DataFormat, "%s cannot be read as %s", f.name, f.format).
		At("%s", place{f.path, int64(bad.Line)}).Because("%s", err)
	if errors.Is(err, csv.ErrFieldCount) {
		return e.Try("give every row as many columns as the first line names, and put text with a " +
			"comma or a line break into quotes")
	}
	return e.Try("put text with quotes into quotes, and write each quote in it twice")
}

// A bounded reader ends with errTooLong where more is taken than a row may have.
type bounded struct {
	in    io.Reader
	limit int
	taken int // since the last row
}

// errTooLong says that a row is longer than a document may be.
var errTooLong = errors.New("too long")

func (b *bounded) Read(p []byte) (int, error) {
	if b.taken > b.limit+1<<16 { // what the csv reader has ahead is not the row's
		return 0, errTooLong
	}
	n, err := b.in.Read(p)
	b.taken += n
	return n, err
}

// readParquet takes every row as an item. Columns that its kind does not need are not read.
func readParquet(ctx context.Context, f *file, emit func(item) error) error {
	in, err := os.Open(f.path)
	if err != nil {
		return readError(f.path, err)
	}
	defer in.Close()
	bad := func(err error) error {
		return diag.New(diag.DataFormat, "%s cannot be read as parquet", f.name).At("%s", f.path).
			Wrap(err).Try("fetch the file again: it is damaged or truncated")
	}
	pf, err := parquet.Open(in, f.size)
	if err != nil {
		return bad(err)
	}
	paths := lists.Map(pf.Leaves, func(leaf parquet.Leaf) []string { return leaf.Path })
	wanted, err := parquetColumns(f, paths)
	if err != nil {
		return err
	}
	var leaves []int
	for _, w := range wanted {
		leaves = append(leaves, w.leaves...)
	}
	for _, i := range leaves {
		if leaf := pf.Leaves[i]; !leaf.Text() {
			return diag.New(diag.DataFormat, "the column %s is not one of text", leaf.Path[0]).
				At("%s", f.path).Because("its values are %s", leaf.Type)
		}
	}
	if err := pf.Select(leaves...); err != nil {
		return bad(err)
	}
	row := int64(0)
	for i, rows := range pf.Groups {
		columns := make([]*column, len(leaves))
		for j := range leaves {
			c, err := pf.Column(i, j, pagesOfDocument*int64(f.limit))
			if err != nil {
				return bad(err)
			}
			defer c.Close()
			columns[j] = &column{Column: c}
		}
		for range rows {
			row++
			it := item{where: place{f.path, row}, read: f.size * int64(i) / int64(len(pf.Groups))}
			if err := it.fromColumns(f, columns, wanted); err != nil {
				if _, ok := errors.AsType[*diag.Error](err); ok {
					return err
				}
				return bad(err)
			}
			if it.size() > 0 {
				if err := emit(it); err != nil {
					return err
				}
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// pagesOfDocument is how many of the longest documents a page may hold: writers close a page by its
// size only after some rows. At 16 MiB it is 128 MiB.
const pagesOfDocument = 8

// A parquetColumn is a column to read: one leaf with text or JSON, or the two of messages with
// their roles and contents.
type parquetColumn struct {
	name   string
	leaves []int
	turns  bool // roles are ShareGPT's speakers
}

// parquetColumns finds the columns that the kind of the rows needs.
func parquetColumns(f *file, paths [][]string) (list []parquetColumn, err error) {
	names := slices.Compact(lists.Map(paths, func(path []string) string { return path[0] }))
	has := func(name string) bool { return slices.Contains(names, name) }
	kind, err := f.columns.Of(has, names)
	if err != nil {
		return nil, diag.From(err).At("%s", f.path)
	}
	for _, name := range f.columns.Needs(kind, has) {
		c := parquetColumn{name: name}
		parts := map[string]int{}
		for i, path := range paths {
			switch {
			case path[0] != name:
			case len(path) == 1:
				c.leaves = []int{i}
			case slices.Contains(path, "tool_calls"):
				return nil, diag.New(diag.NotSupported, "tool calls in columns of parquet are not read").
					At("%s", f.path).Try("write the messages as JSON in a column of text, or as jsonl")
			default:
				parts[path[len(path)-1]] = i
			}
		}
		for _, pair := range [][2]string{{"role", "content"}, {"from", "value"}} {
			role, hasRole := parts[pair[0]]
			content, hasContent := parts[pair[1]]
			if hasRole && hasContent {
				c.leaves, c.turns = []int{role, content}, pair[0] == "from"
				break
			}
		}
		if c.leaves == nil {
			return nil, diag.New(diag.DataFormat, "the column %q has neither text nor messages", name).
				At("%s", f.path).Try("write it as text, or as a list of role and content")
		}
		list = append(list, c)
	}
	return list, nil
}

// fromColumns reads the next row. A row without a value in its first column is passed over.
func (it *item) fromColumns(f *file, columns []*column, wanted []parquetColumn) error {
	it.row = chat.Row{Text: map[string]string{}, Chat: map[string][]chat.Message{}}
	empty := false
	for i, w := range wanted {
		rows := make([][]parquet.Value, len(w.leaves))
		for j := range w.leaves {
			var err error
			if rows[j], err = columns[j].row(f, it.where); err != nil {
				return err
			}
			rows[j] = slices.Clone(rows[j])
		}
		columns = columns[len(w.leaves):]
		first := rows[0][0]
		switch {
		case len(w.leaves) == 2:
			messages, err := it.fromMessages(rows[0], rows[1], w.turns)
			if err != nil {
				return err
			}
			if messages != nil {
				it.row.Chat[w.name] = messages
			}
			empty = empty || i == 0 && messages == nil
		case first.Null:
			empty = empty || i == 0
		case !utf8.Valid(first.Bytes):
			return diag.New(diag.DataFormat, "column %q is not UTF-8", w.name).At("%s", it.where).
				Try("write the column as a string of UTF-8")
		default:
			it.row.Text[w.name] = string(first.Bytes)
		}
	}
	if empty {
		it.row = chat.Row{}
	}
	return nil
}

// fromMessages reads a chat from two columns of equal length, roles and contents.
func (it *item) fromMessages(roles, contents []parquet.Value, turns bool) (list []chat.Message,
	err error) {
	if len(roles) != len(contents) {
		return nil, fmt.Errorf("row %d has %d roles and %d contents", it.where.line, len(roles),
			len(contents))
	}
	if len(roles) == 1 && roles[0].Null && contents[0].Null {
		return nil, nil // an empty list
	}
	for i := range roles {
		if roles[i].Null || contents[i].Null {
			return nil, diag.New(diag.DataFormat, "message %d has no role or no content", i+1).
				At("%s", it.where)
		}
		m := chat.Message{Role: string(roles[i].Bytes), Content: string(contents[i].Bytes)}
		if !utf8.ValidString(m.Role + m.Content) {
			return nil, diag.New(diag.DataFormat, "message %d is not UTF-8", i+1).At("%s", it.where)
		}
		if turns {
			if m.Role, err = chat.Role(m.Role); err != nil {
				return nil, diag.From(err).At("%s", it.where)
			}
		}
		list = append(list, m)
	}
	return list, nil
}

// A column gives the values of a column, row by row.
type column struct {
	*parquet.Column
	ahead *parquet.Value // the first of the next row
	out   []parquet.Value
}

// valueBytes is about what a value takes beside its bytes.
const valueBytes = 48

// row gives the values of the next row, which hold until the next call. A row that has none has a
// null.
func (c *column) row(f *file, at place) ([]parquet.Value, error) {
	c.out = c.out[:0]
	size := 0
	if c.ahead != nil {
		c.out = append(c.out, *c.ahead)
		size = len(c.ahead.Bytes)
		c.ahead = nil
	}
	for size <= f.limit && valueBytes*len(c.out) <= 2*f.limit {
		v, err := c.Next()
		if errors.Is(err, io.EOF) && len(c.out) > 0 {
			return c.out, nil
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // the group has more rows
		}
		if err != nil {
			return nil, err
		}
		v.Bytes = bytes.Clone(v.Bytes) // a page may end within a row
		if len(c.out) > 0 && v.First {
			c.ahead = &v
			return c.out, nil
		}
		c.out = append(c.out, v)
		size += len(v.Bytes)
	}
	return nil, f.tooLong(at, max(size, valueBytes*len(c.out)))
}

package data

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/parquet"
)

// readParquet takes every row as a document: the column text, or messages. Other columns are not
// read.
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
	leaves, chat, err := parquetLeaves(f, paths)
	if err != nil {
		return err
	}
	for _, i := range leaves {
		if leaf := pf.Leaves[i]; !leaf.Text() {
			return diag.New(diag.DataFormat, "the column is not one of text").At("%s", f.path).
				Because("its values are %s", leaf.Type)
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
			if err := it.fromColumns(f, columns, chat); err != nil {
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

// parquetLeaves finds the columns to read: one with text or JSON, or the two of messages with their
// roles and contents.
func parquetLeaves(f *file, paths [][]string) (leaves []int, chat bool, err error) {
	role, content := -1, -1
	var names []string
	for i, path := range paths {
		if len(names) == 0 || names[len(names)-1] != path[0] {
			names = append(names, path[0])
		}
		switch {
		case path[0] != "messages" || len(path) < 2:
		case path[len(path)-1] == "role":
			role = i
		case path[len(path)-1] == "content":
			content = i
		}
	}
	whole := func(name string) int {
		return slices.IndexFunc(paths, func(p []string) bool { return len(p) == 1 && p[0] == name })
	}
	switch {
	case role >= 0 && content >= 0:
		return []int{role, content}, true, nil
	case whole("messages") >= 0:
		return []int{whole("messages")}, true, nil
	case whole("text") >= 0:
		return []int{whole("text")}, false, nil
	}
	it := item{where: place{file: f.path}}
	return nil, false, it.noText(names)
}

// fromColumns reads the next row.
func (it *item) fromColumns(f *file, columns []*column, chat bool) error {
	var rows [2][]parquet.Value
	for i, c := range columns {
		var err error
		if rows[i], err = c.row(f, it.where); err != nil {
			return err
		}
	}
	first := rows[0][0]
	switch {
	case len(columns) == 2:
		return it.fromMessages(rows[0], rows[1])
	case first.Null:
		return nil
	case chat:
		it.line = slices.Concat([]byte(`{"messages":`), first.Bytes, []byte("}"))
	default:
		it.text = string(first.Bytes)
	}
	return nil
}

// fromMessages reads a chat from two columns of equal length, roles and contents.
func (it *item) fromMessages(roles, contents []parquet.Value) error {
	if len(roles) != len(contents) {
		return fmt.Errorf("row %d has %d roles and %d contents", it.where.line, len(roles), len(contents))
	}
	if len(roles) == 1 && roles[0].Null && contents[0].Null {
		return nil // an empty list
	}
	for i := range roles {
		if roles[i].Null || contents[i].Null {
			return diag.New(diag.DataFormat, "message %d has no role or no content", i+1).
				At("%s", it.where)
		}
		it.chat = append(it.chat, message{string(roles[i].Bytes), string(contents[i].Bytes)})
	}
	return nil
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

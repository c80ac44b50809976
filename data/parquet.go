package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/parquet-go/parquet-go"

	"github.com/deepwell/deepwell/diag"
)

// readParquet takes every row as a document: the column text, or messages. Other columns are not
// read.
func readParquet(ctx context.Context, f *file, emit func(item) error) (err error) {
	in, err := os.Open(f.path)
	if err != nil {
		return readError(f.path, err)
	}
	defer in.Close()
	bad := func(err error) error {
		return diag.New(diag.DataFormat, "%s cannot be read as parquet", f.name).At("%s", f.path).
			Wrap(err).Try("fetch the file again: it is damaged or cut off")
	}
	// The library panics on some damaged files.
	defer func() {
		if v := recover(); v != nil {
			err = bad(fmt.Errorf("%v", v))
		}
	}()
	pf, err := parquet.OpenFile(in, f.size, parquet.SkipPageIndex(true),
		parquet.SkipBloomFilters(true))
	if err != nil {
		return bad(err)
	}
	leaves, chat, err := parquetLeaves(f, pf.Schema().Columns())
	if err != nil {
		return err
	}
	row := int64(0)
	for i, group := range pf.RowGroups() {
		columns := make([]*column, len(leaves))
		for j, leaf := range leaves {
			columns[j] = &column{pages: group.ColumnChunks()[leaf].Pages()}
		}
		for range group.NumRows() {
			row++
			it := item{where: place{f.path, row}, read: f.size * int64(i) / int64(len(pf.RowGroups()))}
			if err = it.fromColumns(columns, chat); err != nil {
				break
			}
			if it.size() == 0 {
				continue
			}
			if err = emit(it); err != nil {
				break
			}
			if err = ctx.Err(); err != nil {
				break
			}
		}
		for _, c := range columns {
			c.close()
		}
		if _, ok := errors.AsType[*diag.Error](err); err != nil && (ok || ctx.Err() != nil) {
			return err
		}
		if errors.Is(err, errEnough) {
			return err
		}
		if err != nil {
			return bad(err)
		}
	}
	return nil
}

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
func (it *item) fromColumns(columns []*column, chat bool) error {
	var rows [2][]parquet.Value
	for i, c := range columns {
		var err error
		if rows[i], err = c.row(); err != nil {
			return err
		}
		for _, v := range rows[i] {
			if !v.IsNull() && v.Kind() != parquet.ByteArray && v.Kind() != parquet.FixedLenByteArray {
				return diag.New(diag.DataFormat, "the column is not one of text").At("%s", it.where).
					Because("its values are %s", v.Kind())
			}
		}
	}
	first := rows[0][0]
	switch {
	case len(columns) == 2:
		return it.fromMessages(rows[0], rows[1])
	case first.IsNull():
		return nil
	case chat:
		it.line = slices.Concat([]byte(`{"messages":`), first.ByteArray(), []byte("}"))
	default:
		it.text = string(first.ByteArray())
	}
	return nil
}

func (it *item) fromMessages(roles, contents []parquet.Value) error {
	if len(roles) != len(contents) {
		return fmt.Errorf("row %d has %d roles and %d contents", it.where.line, len(roles), len(contents))
	}
	if len(roles) == 1 && roles[0].IsNull() && contents[0].IsNull() {
		return nil // an empty list
	}
	for i := range roles {
		if roles[i].IsNull() || contents[i].IsNull() {
			return diag.New(diag.DataFormat, "message %d has no role or no content", i+1).
				At("%s", it.where)
		}
		it.chat = append(it.chat, message{string(roles[i].ByteArray()), string(contents[i].ByteArray())})
	}
	return nil
}

// A column gives the values of a column, row by row.
type column struct {
	pages  parquet.Pages
	page   parquet.Page
	values parquet.ValueReader
	buf    [256]parquet.Value
	ready  []parquet.Value // read but not given yet
	out    []parquet.Value
}

// row gives the values of the next row, which hold until the next call. A row that has none has a
// null.
func (c *column) row() ([]parquet.Value, error) {
	c.out = c.out[:0]
	for {
		if len(c.ready) == 0 {
			err := c.more()
			if errors.Is(err, io.EOF) && len(c.out) > 0 {
				return c.out, nil
			}
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF // the group has more rows
			}
			if err != nil {
				return nil, err
			}
			continue
		}
		if len(c.out) > 0 && c.ready[0].RepetitionLevel() == 0 {
			return c.out, nil
		}
		c.out = append(c.out, c.ready[0].Clone()) // a page may end within a row
		c.ready = c.ready[1:]
		if len(c.out) > maxDocument/64 {
			return nil, errors.New("a row has too many values")
		}
	}
}

// more reads values into ready.
func (c *column) more() error {
	if c.values == nil {
		c.release()
		page, err := c.pages.ReadPage()
		if err != nil {
			return err
		}
		c.page, c.values = page, page.Values()
	}
	n, err := c.values.ReadValues(c.buf[:])
	c.ready = c.buf[:n]
	if errors.Is(err, io.EOF) {
		c.values, err = nil, nil // the page stays until what was read of it is given
	}
	return err
}

func (c *column) release() {
	if c.page != nil {
		parquet.Release(c.page)
		c.page = nil
	}
}

func (c *column) close() {
	c.release()
	_ = c.pages.Close()
}

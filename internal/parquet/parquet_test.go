package parquet_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"

	library "github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress"

	"github.com/deepwell/deepwell/internal/parquet"
)

// read gives the values of the first leaf, with a null as "∅" and a | before each row.
func read(raw []byte, limit int64) ([]string, error) {
	f, err := parquet.Open(bytes.NewReader(raw), int64(len(raw)))
	if err != nil {
		return nil, err
	}
	leaf := slices.IndexFunc(f.Leaves, func(l parquet.Leaf) bool { return l.Text() })
	if leaf < 0 {
		return nil, errors.New("no text")
	}
	if err := f.Select(leaf); err != nil {
		return nil, err
	}
	var out []string
	for g := range f.Groups {
		c, err := f.Column(g, 0, limit)
		if err != nil {
			return out, err
		}
		defer c.Close()
		for len(out) < 1<<14 {
			v, err := c.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return out, err
			}
			text := string(v.Bytes)
			if v.Null {
				text = "∅"
			}
			if v.First {
				text = "|" + text
			}
			out = append(out, text)
		}
	}
	return out, nil
}

type plain struct {
	Text string `parquet:"text"`
}
type optional struct {
	Text *string `parquet:"text,optional,dict"`
}
type lists struct {
	Text []string `parquet:"text,list"`
}
type deltaLength struct {
	Text string `parquet:"text,delta"`
}

// What the library writes is read as it was: every codec, version of pages and encoding.
func TestReadsWhatTheLibraryWrites(t *testing.T) {
	var texts []string
	for i := range 700 {
		texts = append(texts, strings.Repeat(fmt.Sprintf("row %d of text, ", i%97), i%7))
	}
	for _, codec := range []compress.Codec{&library.Uncompressed, &library.Snappy, &library.Gzip, &library.Brotli, &library.Zstd, &library.Lz4Raw} {
		for version := 1; version <= 2; version++ {
			options := []library.WriterOption{library.Compression(codec), library.DataPageVersion(version),
				library.PageBufferSize(4096), library.MaxRowsPerRowGroup(300)}
			name := fmt.Sprint(codec, " ", version)
			var want []string
			for _, text := range texts {
				want = append(want, "|"+text)
			}
			check(t, name, want, func(w io.Writer) error {
				rows := make([]plain, len(texts))
				for i := range rows {
					rows[i].Text = texts[i]
				}
				return library.Write(w, rows, options...)
			})
			check(t, name+" delta", want, func(w io.Writer) error {
				rows := make([]deltaLength, len(texts))
				for i := range rows {
					rows[i].Text = texts[i]
				}
				return library.Write(w, rows, options...)
			})
			check(t, name+" shared", want, func(w io.Writer) error {
				rows := make([]plain, len(texts))
				for i := range rows {
					rows[i].Text = texts[i]
				}
				schema := library.NewSchema("x", library.Group{"text": library.Encoded(library.String(), &library.DeltaByteArray)})
				return library.Write(w, rows, append(options, schema)...)
			})
			want = nil
			optionals := make([]optional, len(texts))
			for i := range optionals {
				if i%5 == 0 {
					want = append(want, "|∅")
					continue
				}
				optionals[i].Text = &texts[i]
				want = append(want, "|"+texts[i])
			}
			check(t, name+" optional", want, func(w io.Writer) error { return library.Write(w, optionals, options...) })
			want = nil
			many := make([]lists, 200)
			for i := range many {
				many[i].Text = texts[i : i+i%4]
				for j, text := range many[i].Text {
					want = append(want, strings.Repeat("|", max(0, 1-j))+text)
				}
				if i%4 == 0 {
					want = append(want, "|∅")
				}
			}
			check(t, name+" lists", want, func(w io.Writer) error { return library.Write(w, many, options...) })
		}
	}
}

func check(t *testing.T, name string, want []string, write func(io.Writer) error) {
	t.Helper()
	var b bytes.Buffer
	if err := write(&b); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	got, err := read(b.Bytes(), 1<<20)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%s: %d values, not %d: %v", name, len(got), len(want), err)
	}
}

// text is a file that pyarrow wrote.
func text(t testing.TB) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "..", "data", "testdata", "text.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// oneBit is the file of finding A8: its codec is LZ4_RAW, not ZSTD.
func oneBit(t testing.TB) []byte {
	raw := text(t)
	raw[1660] = 0x0e
	return raw
}

// allocated runs a function and gives the bytes that were allocated meanwhile, by all.
func allocated(f func()) uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	before := s[0].Value.Uint64()
	f()
	metrics.Read(s)
	return s[0].Value.Uint64() - before
}

func TestOneFlippedBitIsRefused(t *testing.T) {
	var err error
	n := allocated(func() { _, err = read(oneBit(t), 1<<27) })
	if err == nil || n > 1<<24 {
		t.Errorf("%d bytes were allocated: %v", n, err)
	}
	if _, err := read(text(t), 1<<27); err != nil {
		t.Error(err)
	}
}

// FuzzMemory holds damaged files to a bound of memory, as Go cannot recover where there is no more.
func FuzzMemory(f *testing.F) {
	f.Add(text(f))
	f.Add(oneBit(f))
	for _, name := range []string{"chat", "other"} {
		raw, err := os.ReadFile(filepath.Join("..", "..", "data", "testdata", name+".parquet"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	texts := make([]optional, 40)
	for i := range texts {
		word := strings.Repeat("word ", i%9)
		texts[i].Text = &word
	}
	for i, codec := range []compress.Codec{&library.Uncompressed, &library.Snappy, &library.Gzip, &library.Brotli, &library.Zstd, &library.Lz4Raw} {
		var b bytes.Buffer
		if err := library.Write(&b, texts, library.Compression(codec), library.DataPageVersion(1+i%2)); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 1<<16 {
			return
		}
		if n := allocated(func() { _, _ = read(raw, 1<<20) }); n > 1<<28 {
			t.Fatalf("%d bytes allocate %d", len(raw), n)
		}
	})
}

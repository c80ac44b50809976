package safetensors

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

var dump = flag.String("dump", "", "write the hostile files to this folder, for make.py --hostile")

// raw puts a file together without asking whether it makes sense.
func raw(header, data string) []byte {
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), data...)
}

// one is the header of a single tensor called a.
func one(dtype, shape, offsets string) string {
	return fmt.Sprintf(`{"a":{"dtype":"%s","shape":%s,"data_offsets":%s}}`, dtype, shape, offsets)
}

func claim(n uint64, rest string) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, n), rest...)
}

// A hostile is one input: the bytes of a file, or a folder that make fills and of which open is
// opened. The error must have the code and hold the words; a row without a code must be taken.
type hostile struct {
	name  string
	data  []byte
	make  func(t *testing.T, dir string)
	open  string
	code  diag.Code
	words string
	lax   bool // the reference library takes it (make.py --hostile asks it)
}

const (
	good   = `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`
	second = `{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`
	shard1 = "model-00001-of-00002.safetensors"
	shard2 = "model-00002-of-00002.safetensors"
	theIdx = "model.safetensors.index.json"
)

func put(t *testing.T, dir, name string, data []byte) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// model writes two good shards and the given index, in which 1 and 2 stand for the shards.
func model(index string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		put(t, dir, shard1, raw(good, "abcd"))
		put(t, dir, shard2, raw(second, "efgh"))
		index = strings.NewReplacer("<1>", shard1, "<2>", shard2).Replace(index)
		put(t, dir, theIdx, []byte(index))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func hostiles() []hostile {
	const bad, file = codeFormat, codeFile
	long := strings.Repeat("n", 1<<20)
	var keys []string
	for i := range maxKeys + 1 {
		keys = append(keys, fmt.Sprintf(`"%d":""`, i))
	}
	return []hostile{
		// The length.
		{name: "empty", data: []byte{}, code: bad, words: "0 bytes, too few"},
		{name: "seven-bytes", data: []byte("1234567"), code: bad, words: "7 bytes, too few"},
		{name: "length-zero", data: claim(0, ""), code: bad, words: "the header is empty"},
		{name: "length-max", data: claim(1<<64-1, good), code: bad, words: "claims 18446744073709551615"},
		{name: "length-sign", data: claim(1<<63, good), code: bad, words: "claims 9223372036854775808"},
		{name: "length-over", data: claim(maxHeader+1, good), code: bad, words: "at most 100000000"},
		{name: "length-past-end", data: claim(54, good), code: bad, words: "truncated: the header has 54"},
		{name: "length-short", data: claim(52, good+"abcd"), code: bad, words: "byte 52: ',' wanted, the end"},
		{name: "lfs-pointer", data: []byte("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a"),
			code: bad, words: "git lfs pull"},
		{name: "zip", data: []byte("PK\x03\x04\x14\x00\x00\x00\x08\x00archive/data.pkl"), code: bad, words: "no pickles"},
		{name: "pickle", data: []byte("\x80\x02}q\x00X\x01\x00\x00\x00a"), code: bad, words: "no pickles"},
		{name: "web-page", data: []byte("<!DOCTYPE html><html>"), code: bad, words: "web page"},
		{name: "gguf", data: []byte("GGUF\x03\x00\x00\x00\x01"), code: bad, words: "GGUF"},

		// The header's text.
		{name: "not-object", data: raw("[1,2]", ""), code: bad, words: "does not begin with {"},
		{name: "blank-before", data: raw(" "+good, "abcd"), code: bad, words: "does not begin with {", lax: true},
		{name: "blank-after", data: raw(good+"   ", "abcd")},
		{name: "line-feed-after", data: raw(good+"\n", "abcd"), code: bad, words: "only spaces may follow", lax: true},
		{name: "nul-after", data: raw(good+"\x00\x00", "abcd"), code: bad, words: "only spaces may follow"},
		{name: "two-objects", data: raw(good+"{}", "abcd"), code: bad, words: "only spaces may follow"},
		{name: "open-object", data: raw(`{`, ""), code: bad, words: "'\"' wanted, the end found"},
		{name: "open-string", data: raw(`{"a`, ""), code: bad, words: "a string has no end"},
		{name: "comma-last", data: raw(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},}`, "abcd"), code: bad, words: "'\"' wanted"},
		{name: "not-utf8", data: raw("{\"a\xff\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "abcd"), code: bad, words: "not UTF-8"},
		{name: "blanks-within", data: raw("{ \"a\" :\t{\"dtype\":\r\n\"U8\", \"shape\":[ 2, 2 ] ,\"data_offsets\":[0,4]} }", "abcd")},
		{name: "no-tensors", data: raw("{}", "")},
		{name: "deep", data: raw(`{"a":`+strings.Repeat("[", 10_000), ""), code: bad, words: "'{' wanted, '[' found"},
		{name: "deep-shape", data: raw(one("U8", strings.Repeat("[", 10_000), "[0,4]"), "abcd"), code: bad, words: "a whole number wanted"},
		{name: "tensor-array", data: raw(`{"a":["U8",[4],[0,4]]}`, "abcd"), code: bad, words: "'{' wanted", lax: true},
		{name: "tensor-null", data: raw(`{"a":null}`, ""), code: bad, words: "'{' wanted, 'n'"},

		// Names.
		{name: "name-twice", data: raw(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, "abcd"),
			code: bad, words: `the name "a" stands twice`},
		{name: "name-twice-same", data: raw(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, ""),
			code: bad, words: `the name "a" stands twice`, lax: true},
		{name: "name-twice-escaped", data: raw(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, ""),
			code: bad, words: `the name "a" stands twice`, lax: true},
		{name: "name-empty", data: raw(strings.Replace(good, `"a"`, `""`, 1), "abcd"), code: bad, words: "empty name", lax: true},
		{name: "name-long", data: raw(strings.Replace(good, `"a"`, `"`+long+`"`, 1), "abcd"), code: bad, words: "1048576 bytes; at most 4096", lax: true},
		{name: "name-nul", data: raw(strings.Replace(good, `"a"`, `"a\u0000"`, 1), "abcd"), code: bad, words: `"a\x00" holds a control character`, lax: true},
		{name: "name-raw-nul", data: raw(strings.Replace(good, `"a"`, "\"a\x00\"", 1), "abcd"), code: bad, words: "raw control character"},
		{name: "name-terminal", data: raw(strings.Replace(good, `"a"`, `"\u001b[2J"`, 1), "abcd"), code: bad, words: `"\x1b[2J" holds a control`, lax: true},
		{name: "name-half-pair", data: raw(strings.Replace(good, `"a"`, `"\ud800"`, 1), "abcd"), code: bad, words: "half of a surrogate pair"},
		{name: "name-swapped-pair", data: raw(strings.Replace(good, `"a"`, `"\udc00\ud800"`, 1), "abcd"), code: bad, words: "half of a surrogate pair"},
		{name: "name-bad-escape", data: raw(strings.Replace(good, `"a"`, `"\x61"`, 1), "abcd"), code: bad, words: "unknown escape"},
		{name: "name-short-escape", data: raw(strings.Replace(good, `"a"`, `"\u+061"`, 1), "abcd"), code: bad, words: "without four digits"},
		{name: "name-escape-at-end", data: raw(`{"\`, ""), code: bad, words: "ends within an escape"},
		{name: "name-path", data: raw(strings.Replace(good, `"a"`, `"../x"`, 1), "abcd")},
		{name: "name-look-alike", data: raw(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"а":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, "abcd")},

		// Fields.
		{name: "field-case", data: raw(strings.Replace(good, "dtype", "DTYPE", 1), "abcd"), code: bad, words: `"DTYPE" is not a field`},
		{name: "field-unknown", data: raw(strings.Replace(good, `"dtype"`, `"x":1,"dtype"`, 1), "abcd"), code: bad, words: `"x" is not a field`, lax: true},
		{name: "field-twice", data: raw(strings.Replace(good, `"dtype"`, `"dtype":"I8","dtype"`, 1), "abcd"), code: bad, words: "dtype stands twice"},
		{name: "field-missing", data: raw(`{"a":{"dtype":"U8","data_offsets":[0,4]}}`, "abcd"), code: bad, words: "is missing"},
		{name: "dtype-unknown", data: raw(one("F99", "[4]", "[0,4]"), "abcd"), code: bad, words: `"F99" is not an element type`},
		{name: "dtype-lower", data: raw(one("bf16", "[2]", "[0,4]"), "abcd"), code: bad, words: `"bf16" is not an element type`},
		{name: "dtype-foreign", data: raw(one("F6_E2M3", "[4]", "[0,3]"), "abc"), code: bad, words: "F6_E2M3 has no counterpart", lax: true},
		{name: "dtype-number", data: raw(`{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}`, "abcd"), code: bad, words: `'"' wanted, '8'`},
		{name: "shape-null", data: raw(one("U8", "null", "[0,4]"), "abcd"), code: bad, words: "'[' wanted"},
		{name: "shape-negative", data: raw(one("U8", "[-4]", "[0,4]"), "abcd"), code: bad, words: "a whole number wanted, '-'"},
		{name: "shape-float", data: raw(one("U8", "[4.0]", "[0,4]"), "abcd"), code: bad, words: "not written as a whole number"},
		{name: "shape-exponent", data: raw(one("U8", "[4e0]", "[0,4]"), "abcd"), code: bad, words: "not written as a whole number"},
		{name: "shape-leading-zero", data: raw(one("U8", "[04]", "[0,4]"), "abcd"), code: bad, words: "starts with 0"},
		{name: "shape-2^64", data: raw(one("U8", "[18446744073709551616]", "[0,0]"), ""), code: bad, words: "larger than 2^63-1"},
		{name: "shape-string", data: raw(one("U8", `["4"]`, "[0,4]"), "abcd"), code: bad, words: `a whole number wanted, '"'`},
		{name: "shape-wraps", data: raw(one("U8", "[8589934592,2147483648]", "[0,0]"), ""), code: bad, words: "overflows"},
		{name: "shape-wraps-bits", data: raw(one("F64", "[4611686018427387904]", "[0,0]"), ""), code: bad, words: "overflows"},
		{name: "shape-wraps-then-zero", data: raw(one("U8", "[0,8589934592,8589934592]", "[0,0]"), ""), code: bad, words: "overflows", lax: true},
		{name: "shape-1000-dims", data: raw(one("U8", "[1"+strings.Repeat(",1", 999)+"]", "[0,1]"), "a"), code: bad, words: "more than 64 dimensions", lax: true},
		{name: "shape-65-dims", data: raw(one("U8", "[1"+strings.Repeat(",1", 64)+"]", "[0,1]"), "a"), code: bad, words: "65 dimensions", lax: true},
		{name: "shape-64-dims", data: raw(one("U8", "[1"+strings.Repeat(",1", 63)+"]", "[0,1]"), "a")},
		{name: "shape-scalar", data: raw(one("F32", "[]", "[0,4]"), "abcd")},
		{name: "shape-zero", data: raw(one("F32", "[7,0]", "[0,0]"), "")},
		{name: "f4-odd", data: raw(one("F4", "[3]", "[0,2]"), "ab"), code: bad, words: "whole byte"},
		{name: "f4-scalar", data: raw(one("F4", "[]", "[0,1]"), "a"), code: bad, words: "whole byte"},
		{name: "f4-rows-share-bytes", data: raw(one("F4", "[2,3]", "[0,3]"), "abc")},

		// Offsets.
		{name: "offsets-one", data: raw(one("U8", "[4]", "[4]"), "abcd"), code: bad, words: "1 numbers, not two"},
		{name: "offsets-three", data: raw(one("U8", "[4]", "[0,4,4]"), "abcd"), code: bad, words: "more than two"},
		{name: "offsets-null", data: raw(one("U8", "[4]", "null"), "abcd"), code: bad, words: "'[' wanted"},
		{name: "offsets-reversed", data: raw(one("U8", "[4]", "[4,0]"), "abcd"), code: bad, words: "ends at 0, before it begins at 4"},
		{name: "offsets-wide", data: raw(one("U8", "[2]", "[0,4]"), "abcd"), code: bad, words: "u8[2] takes 2 bytes, its offsets 0 to 4 hold 4"},
		{name: "offsets-short", data: raw(one("F32", "[4]", "[0,4]"), "abcd"), code: bad, words: "f32[4] takes 16 bytes"},
		{name: "offsets-past-end", data: raw(good, "abc"), code: bad, words: "truncated: 3 of 4"},
		{name: "offsets-far", data: raw(one("U8", "[4]", "[9223372036854775803,9223372036854775807]"), "abcd"), code: bad, words: "9223372036854775803 bytes before it"},
		{name: "offsets-hole-first", data: raw(one("U8", "[2]", "[2,4]"), "abcd"), code: bad, words: "the 2 bytes before it belong to no tensor"},
		{name: "offsets-hole-between", data: raw(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}`, "abcd"),
			code: bad, words: `tensor "b": the 2 bytes before it`},
		{name: "offsets-overlap", data: raw(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, "abcd"),
			code: bad, words: `tensor "b": it overlaps tensor "a"`},
		{name: "offsets-shared", data: raw(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, "abcd"),
			code: bad, words: "overlaps"},
		{name: "offsets-empty-elsewhere", data: raw(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}`, "abcd"),
			code: bad, words: `tensor "b": it overlaps`},
		{name: "offsets-any-order", data: raw(`{"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}`, "abcd")},
		{name: "tail-zip", data: raw(good, "abcdPK\x05\x06"), code: bad, words: "the last 4 bytes belong to no tensor"},
		{name: "tail-without-tensors", data: raw("{}", "x"), code: bad, words: "the last 1 bytes"},

		// Metadata.
		{name: "metadata", data: raw(`{"__metadata__":{"a":"b","":""},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, "abcd")},
		{name: "metadata-number", data: raw(`{"__metadata__":{"a":1}}`, ""), code: bad, words: "not an object of strings"},
		{name: "metadata-nested", data: raw(`{"__metadata__":{"a":{}}}`, ""), code: bad, words: "not an object of strings"},
		{name: "metadata-array", data: raw(`{"__metadata__":[]}`, ""), code: bad, words: "not an object of strings"},
		{name: "metadata-null", data: raw(`{"__metadata__":null}`, ""), code: bad, words: "not an object of strings", lax: true},
		{name: "metadata-twice", data: raw(`{"__metadata__":{},"__metadata__":{}}`, ""), code: bad, words: "__metadata__ stands twice"},
		{name: "metadata-key-twice", data: raw(`{"__metadata__":{"a":"1","a":"2"}}`, ""), code: bad, words: `holds "a" twice`, lax: true},
		{name: "metadata-many", data: raw(`{"__metadata__":{`+strings.Join(keys, ",")+`}}`, ""), code: bad, words: "more than 65536 keys", lax: true},
		{name: "metadata-tensor", data: raw(`{"__metadata__":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, "abcd"), code: bad, words: "not an object of strings"},

		// What stands in the place of a file.
		{name: "missing-path", make: func(*testing.T, string) {}, open: "none.safetensors", code: file, words: "no such file"},
		{name: "folder-as-file", open: "", code: bad, words: "not a plain file but a folder", make: func(t *testing.T, dir string) {
			put(t, dir, "model.safetensors/x", nil)
		}},
		{name: "pipe", open: "p.safetensors", code: bad, words: "a pipe", make: func(t *testing.T, dir string) {
			must(t, unix.Mkfifo(filepath.Join(dir, "p.safetensors"), 0o644))
		}},
		{name: "pipe-in-folder", code: bad, words: "a pipe", make: func(t *testing.T, dir string) {
			must(t, unix.Mkfifo(filepath.Join(dir, "model.safetensors"), 0o644))
		}},
		{name: "pipe-as-index", open: theIdx, code: bad, words: "a pipe", make: func(t *testing.T, dir string) {
			must(t, unix.Mkfifo(filepath.Join(dir, theIdx), 0o644))
		}},
		{name: "socket", open: "s.safetensors", code: file, words: "no such device", make: func(t *testing.T, dir string) {
			l, err := net.Listen("unix", filepath.Join(dir, "s.safetensors"))
			must(t, err)
			t.Cleanup(func() { _ = l.Close() })
		}},
		{name: "device", open: "d.safetensors", code: bad, words: "a device", make: func(t *testing.T, dir string) {
			must(t, os.Symlink(os.DevNull, filepath.Join(dir, "d.safetensors")))
		}},

		// Folders.
		{name: "folder-empty", make: func(*testing.T, string) {}, code: diag.ModelMissing, words: "no file of tensors"},
		{name: "folder-of-pickles", code: diag.WeightsIncomplete, words: "is a pickle", make: func(t *testing.T, dir string) {
			put(t, dir, "pytorch_model.bin", []byte("PK\x03\x04"))
		}},
		{name: "folder-without-index", code: diag.WeightsIncomplete, words: "2 files of tensors and no index", make: func(t *testing.T, dir string) {
			put(t, dir, shard1, raw(good, "abcd"))
			put(t, dir, shard2, raw(second, "efgh"))
		}},
		{name: "link-out", code: file, words: "link that leaves the folder", make: func(t *testing.T, dir string) {
			put(t, dir, "../secret.safetensors", raw(good, "abcd"))
			must(t, os.Symlink("../secret.safetensors", filepath.Join(dir, "model.safetensors")))
		}},
		{name: "link-out-absolute", code: file, words: "link that leaves the folder", make: func(t *testing.T, dir string) {
			put(t, dir, "../secret.safetensors", raw(good, "abcd"))
			must(t, os.Symlink(filepath.Join(filepath.Dir(dir), "secret.safetensors"), filepath.Join(dir, "model.safetensors")))
		}},
		{name: "hard-link", code: bad, words: "second name", make: func(t *testing.T, dir string) {
			put(t, dir, "../secret.safetensors", raw(good, "abcd"))
			must(t, os.Link(filepath.Join(filepath.Dir(dir), "secret.safetensors"), filepath.Join(dir, "model.safetensors")))
		}},
		{name: "link-inside", make: func(t *testing.T, dir string) {
			put(t, dir, "real/a", raw(good, "abcd"))
			must(t, os.Symlink("real/a", filepath.Join(dir, "model.safetensors")))
		}},
		{name: "cache", open: "snapshots/rev", make: func(t *testing.T, dir string) {
			put(t, dir, "blobs/f00d", raw(good, "abcd"))
			must(t, os.MkdirAll(filepath.Join(dir, "snapshots/rev"), 0o755))
			must(t, os.Symlink("../../blobs/f00d", filepath.Join(dir, "snapshots/rev/model.safetensors")))
		}},
		{name: "cache-link-out", open: "snapshots/rev", code: file, words: "link that leaves the folder", make: func(t *testing.T, dir string) {
			put(t, dir, "../f00d", raw(good, "abcd"))
			must(t, os.MkdirAll(filepath.Join(dir, "blobs"), 0o755))
			must(t, os.MkdirAll(filepath.Join(dir, "snapshots/rev"), 0o755))
			must(t, os.Symlink("../../../f00d", filepath.Join(dir, "snapshots/rev/model.safetensors")))
		}},

		// The index.
		{name: "index", make: model(`{"metadata":{"total_size":8.0,"x":[{}]},"weight_map":{"a":"<1>","b":"<2>"},"more":null}`)},
		{name: "index-by-path", open: theIdx, make: model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)},
		{name: "index-empty", make: model(``), code: bad, words: "'{' wanted, the end"},
		{name: "index-array", make: model(`[]`), code: bad, words: "'{' wanted"},
		{name: "index-tail", make: model(`{"weight_map":{"a":"<1>"}} x`), code: bad, words: "something follows"},
		{name: "index-nul", make: model("{\"weight_map\":{\"a\":\"<1>\"}}\x00"), code: bad, words: "something follows"},
		{name: "index-not-utf8", make: model("{\"weight_map\":{\"\xff\":\"<1>\"}}"), code: bad, words: "not UTF-8"},
		{name: "index-without-map", make: model(`{"metadata":{}}`), code: bad, words: "no weight_map"},
		{name: "index-map-twice", make: model(`{"weight_map":{},"weight_map":{}}`), code: bad, words: `"weight_map" twice`},
		{name: "index-deep", make: model(`{"metadata":` + strings.Repeat("[", 10_000)), code: bad, words: "nest deeper than 64"},
		{name: "index-word", make: model(`{"metadata":nil}`), code: bad, words: "a value wanted"},
		{name: "index-number", make: model(`{"weight_map":{"a":1}}`), code: bad, words: `'"' wanted`},
		{name: "index-tensor-twice", make: model(`{"weight_map":{"a":"<1>","a":"<2>"}}`), code: bad, words: `tensor "a" twice`},
		{name: "index-name-empty", make: model(`{"weight_map":{"":"<1>"}}`), code: bad, words: "empty name"},
		{name: "index-parent", make: model(`{"weight_map":{"a":"../x.safetensors"}}`), code: bad, words: "no name within the folder"},
		{name: "index-absolute", make: model(`{"weight_map":{"a":"/etc/x.safetensors"}}`), code: bad, words: "no name within the folder"},
		{name: "index-subfolder", make: model(`{"weight_map":{"a":"x/y.safetensors"}}`), code: bad, words: "no name within the folder"},
		{name: "index-backslash", make: model(`{"weight_map":{"a":"..\\x.safetensors"}}`), code: bad, words: "no name within the folder"},
		{name: "index-file-empty", make: model(`{"weight_map":{"a":""}}`), code: bad, words: "no name within the folder"},
		{name: "index-file-nul", make: model(`{"weight_map":{"a":"x\u0000.safetensors"}}`), code: bad, words: "no name within the folder"},
		{name: "index-file-long", make: model(`{"weight_map":{"a":"` + strings.Repeat("x", 300) + `.safetensors"}}`), code: bad, words: "no name within the folder"},
		{name: "index-of-pickles", make: model(`{"weight_map":{"a":"pytorch_model-00001-of-00002.bin"}}`), code: bad, words: "not safetensors"},
		{name: "index-case-twin", make: model(`{"weight_map":{"a":"<1>","b":"Model-00001-of-00002.safetensors"}}`), code: bad, words: "spells one file"},
		{name: "index-shard-missing", make: model(`{"weight_map":{"a":"<1>","b":"model-00009-of-00002.safetensors"}}`), code: diag.WeightsIncomplete, words: "1 of 2 shards are missing"},
		{name: "index-tensor-absent", make: model(`{"weight_map":{"a":"<1>","c":"<2>"}}`), code: bad, words: `1 tensors are not in the shards where the index puts them: "c"`},
		{name: "index-tensor-elsewhere", make: model(`{"weight_map":{"a":"<2>","b":"<2>"}}`), code: bad, words: "not in the shards where the index puts them"},
		{name: "index-tensor-in-two", code: bad, words: `tensor "a" is in two shards`, make: func(t *testing.T, dir string) {
			model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)(t, dir)
			put(t, dir, shard2, raw(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, "efgh"))
		}},
		{name: "index-shard-broken", code: bad, words: "truncated", make: func(t *testing.T, dir string) {
			model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)(t, dir)
			put(t, dir, shard2, raw(second, "ef"))
		}},
		{name: "index-shard-link", code: file, words: "link that leaves the folder", make: func(t *testing.T, dir string) {
			model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)(t, dir)
			must(t, os.Rename(filepath.Join(dir, shard2), filepath.Join(dir, "../out")))
			must(t, os.Symlink("../out", filepath.Join(dir, shard2)))
		}},
		{name: "index-link-out", code: file, words: "link that leaves the folder", make: func(t *testing.T, dir string) {
			put(t, dir, "../out.json", []byte(`{"weight_map":{}}`))
			must(t, os.Symlink("../out.json", filepath.Join(dir, theIdx)))
		}},
		{name: "index-shard-hard-link", code: bad, words: "second name", make: func(t *testing.T, dir string) {
			model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)(t, dir)
			must(t, os.Link(filepath.Join(dir, shard2), filepath.Join(dir, "../out")))
		}},
	}
}

func TestHostile(t *testing.T) {
	seen := map[string]bool{}
	for i, row := range hostiles() {
		if seen[row.name] {
			t.Errorf("two rows are called %s", row.name)
		}
		seen[row.name] = true
		t.Run(row.name, func(t *testing.T) {
			var set *Set
			var err error
			path := filepath.Join(t.TempDir(), "m")
			must(t, os.Mkdir(path, 0o755))
			if row.data != nil {
				// A file on disk and a file in memory take the same way.
				if set, err = Parse("mem.safetensors", row.data); err == nil {
					must(t, set.Close())
				}
				judge(t, row, err)
				path = filepath.Join(path, "x.safetensors")
				put(t, filepath.Dir(path), "x.safetensors", row.data)
			} else {
				row.make(t, path)
				path = filepath.Join(path, row.open)
			}
			if set, err = Open(path); err == nil {
				exercise(t, set)
			}
			judge(t, row, err)
			if *dump != "" && row.data != nil {
				verdict := map[bool]string{true: "taken", false: "refused"}[row.lax || row.code == ""]
				put(t, *dump, fmt.Sprintf("%03d-%s.%s", i, strings.ReplaceAll(row.name, "^", ""), verdict), row.data)
			}
		})
	}
}

func judge(t *testing.T, row hostile, err error) {
	t.Helper()
	if row.code == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	if err == nil {
		t.Fatal("taken")
	}
	e := diag.From(err)
	if e.Code != row.code || !strings.Contains(err.Error(), row.words) {
		t.Errorf("got %v\nwant %s … %s", err, row.code, row.words)
	}
	if e.Where == "" {
		t.Errorf("the error names no place: %v", err)
	}
	if len(err.Error()) > 1000 {
		t.Errorf("the error has %d bytes", len(err.Error()))
	}
}

package pt2

import (
	"bytes"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// A member is an entry of an archive, with what is wrong about it.
type member struct {
	name, data string
	method     uint16
	flags      uint16
	attributes uint32
	local      string            // another name in the local header
	tweak      func(h, c []byte) // changes the headers, local and central
}

// zipped writes an archive without asking whether it makes sense; large writes zip64's records, too.
func zipped(large bool, members ...member) []byte {
	var file, directory []byte
	for _, m := range members {
		at := uint32(len(file))
		name := m.name
		if m.local != "" {
			name = m.local
		}
		crc := crc32.ChecksumIEEE([]byte(m.data))
		h := make([]byte, localSize)
		copy(h, localSign)
		little.PutUint16(h[6:], m.flags)
		little.PutUint16(h[8:], m.method)
		little.PutUint32(h[14:], crc)
		little.PutUint32(h[18:], uint32(len(m.data)))
		little.PutUint32(h[22:], uint32(len(m.data)))
		little.PutUint16(h[26:], uint16(len(name)))
		c := make([]byte, centralSize)
		copy(c, centralSign)
		copy(c[8:], h[6:26])
		little.PutUint16(c[28:], uint16(len(m.name)))
		little.PutUint32(c[38:], m.attributes)
		little.PutUint32(c[42:], at)
		if m.tweak != nil {
			m.tweak(h, c)
		}
		file = append(append(append(file, h...), name...), m.data...)
		directory = append(append(directory, c...), m.name...)
	}
	begin := len(file)
	file = append(file, directory...)
	if large {
		end := make([]byte, end64Size+locatorSize)
		copy(end, end64Sign)
		little.PutUint64(end[24:], uint64(len(members)))
		little.PutUint64(end[32:], uint64(len(members)))
		little.PutUint64(end[40:], uint64(len(directory)))
		little.PutUint64(end[48:], uint64(begin))
		copy(end[end64Size:], locatorSign)
		little.PutUint64(end[end64Size+8:], uint64(len(file)))
		little.PutUint32(end[end64Size+16:], 1)
		file = append(file, end...)
	}
	end := make([]byte, endSize)
	copy(end, endSign)
	little.PutUint16(end[8:], uint16(len(members)))
	little.PutUint16(end[10:], uint16(len(members)))
	little.PutUint32(end[12:], uint32(len(directory)))
	little.PutUint32(end[16:], uint32(begin))
	return append(file, end...)
}

const (
	goodProgram = `{"graph_module": {"graph": {"inputs": [{"as_tensor": {"name": "w"}}, {"as_tensor": {"name": "x"}}],
"outputs": [{"as_tensor": {"name": "y"}}],
"nodes": [{"target": "torch.ops.aten.linear.default", "inputs": [{"name": "input", "arg": {"as_tensor": {"name": "x"}}, "kind": 1},
{"name": "weight", "arg": {"as_tensor": {"name": "w"}}, "kind": 1}, {"name": "extra", "arg": {"as_none": true}, "kind": 2}],
"outputs": [{"as_tensor": {"name": "y"}}], "metadata": {"nn_module_stack": "L__self__,,M", "stack_trace": "File \"/home/me/m.py\", line 7, in f"},
"is_hop_single_tensor_return": null, "name": "linear"}],
"tensor_values": {"w": {"dtype": 7, "sizes": [{"as_int": 2}, {"as_int": 3}]}, "x": {"dtype": 7, "sizes":
[{"as_expr": {"expr_str": "Symbol('s1', integer=True)", "hint": {"as_int": 4}}}, {"as_int": 3}]}, "y": {"dtype": 7, "sizes": [{"as_int": 2}]}},
"sym_int_values": {}, "sym_bool_values": {}},
"signature": {"input_specs": [{"parameter": {"arg": {"name": "w"}, "parameter_name": "l.weight"}}, {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}],
"output_specs": [{"user_output": {"arg": {"as_tensor": {"name": "y"}}}}]}, "module_call_graph": []},
"range_constraints": {"s1": {"min_val": 2, "max_val": null}}, "schema_version": {"major": 8, "minor": 20}, "torch_version": "2.15.0"}`
	goodWeights = `{"config": {"l.weight": {"path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": {"dtype": 7,
"sizes": [{"as_int": 2}, {"as_int": 3}], "requires_grad": true, "device": {"type": "cpu", "index": null},
"strides": [{"as_int": 3}, {"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}}}}`
	arg = `{"as_none": true}` // of the program, to be replaced
)

// goodMembers make an archive that is read.
func goodMembers(program, weights string) []member {
	return []member{
		{name: "m/data/weights/weight_0", data: strings.Repeat("\x00\x00\x80\x3f", 6)},
		{name: "m/" + weightsName, data: weights},
		{name: "m/" + constsName, data: `{"config": {}}`},
		{name: "m/" + programName, data: program},
		{name: "m/archive_format", data: "pt2"}, {name: "m/archive_version", data: "0"},
		{name: "m/byteorder", data: "little"},
	}
}

func swap(text, old, now string) string {
	if !strings.Contains(text, old) {
		panic("no " + old)
	}
	return strings.Replace(text, old, now, 1)
}

func program(old, now string) []byte {
	return zipped(false, goodMembers(swap(goodProgram, old, now), goodWeights)...)
}

func weights(old, now string) []byte {
	return zipped(false, goodMembers(goodProgram, swap(goodWeights, old, now))...)
}

// with changes or adds members of a good archive.
func with(change func(m []member) []member) []byte {
	return zipped(true, change(goodMembers(goodProgram, goodWeights))...)
}

func add1(m member) []byte { return with(func(all []member) []member { return append(all, m) }) }

// first changes the entry of the weight.
func first(change func(m *member)) []byte {
	return with(func(all []member) []member { change(&all[0]); return all })
}

func set(name, data string) []byte {
	return with(func(all []member) []member {
		for i := range all {
			if all[i].name == name {
				all[i].data = data
			}
		}
		return all
	})
}

func drop(name string) []byte {
	return with(func(all []member) []member {
		for i := range all {
			if all[i].name == name {
				return append(all[:i:i], all[i+1:]...)
			}
		}
		panic(name)
	})
}

// A hostile is an archive, and words of the error; without words it must be taken.
type hostile struct {
	name  string
	data  []byte
	words string
}

func hostiles() []hostile {
	good := zipped(true, goodMembers(goodProgram, goodWeights)...)
	patch := func(at int, b ...byte) []byte { // negative from the end
		c := bytes.Clone(good)
		if at < 0 {
			at += len(c)
		}
		copy(c[at:], b)
		return c
	}
	deep := strings.Repeat(`{"as_string_to_argument": {"a": `, 5000) + arg + strings.Repeat("}}", 5000)
	loop := strings.Repeat(`{"as_graph": {"name": "g", "graph": {"nodes": [{"target": "a", "inputs": [{"name": "", "arg": `, 100) +
		arg + strings.Repeat(`}]}]}}}`, 100)
	expr := `"Symbol('s1', integer=True)"`
	size3 := `{"as_int": 3}]}, "y"`
	node := `[{"target": "torch.ops.aten.linear.default"`
	return append([]hostile{
		{"good", good, ""},
		{"good-small", zipped(false, goodMembers(goodProgram, goodWeights)...), ""},

		// The file.
		{"empty", nil, "0 bytes, too few"},
		{"short", []byte("PK"), "too few"},
		{"pickle", append([]byte("\x80\x02"), bytes.Repeat([]byte{'x'}, 64)...), "is a pickle"},
		{"lfs", []byte("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a"), "git lfs pull"},
		{"web-page", []byte("<!DOCTYPE html><html>" + strings.Repeat(" ", 64)), "web page"},
		{"elf", []byte("\x7fELF" + strings.Repeat("\x00", 64)), "not a zip archive"},
		{"truncated", good[:len(good)-1], "truncated"},
		{"tail", append(bytes.Clone(good), "MZ"...), "something follows it"},
		{"comment", append(patch(-2, 3, 0), "abc"...), "something follows it"},
		{"prefix", append([]byte("#!/bin/sh\n"), good...), "not before its locator"},
		{"prefix-small", append([]byte("#!/bin/sh\n"), zipped(false, goodMembers(goodProgram, goodWeights)...)...), "not where the end"},
		{"directory-beyond", patch(-6, 0xff, 0xff, 0xff, 0x7f), "contradict each other"},
		{"end64-count", patch(-endSize-locatorSize-24, 9), "contradict each other"},
		{"end64-length", patch(-endSize-locatorSize-16+7, 0x80), "contradict"},
		{"locator", patch(-endSize-12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), "not before its locator"},
		{"disks", patch(-endSize+4, 1), "several parts"},
		{"torch-save", zipped(false, member{name: "archive/data.pkl", data: "\x80\x02cos\nsystem\n"}), "torch.save"},
		{"torch-2.4", zipped(false, member{name: "serialized_exported_program.json"}), "older than 2.8"},
		{"inductor", zipped(false, member{name: "a/data/aotinductor/model/x.so"}), "another purpose"},
		{"no-program", zipped(false, member{name: "a/b"}), "no program"},
		{"no-entries", zipped(true), "no program"},

		// Entries.
		{"zip-slip", add1(member{name: "m/../../etc/passwd"}), "an entry called"},
		{"absolute", add1(member{name: "/etc/passwd"}), "an entry called"},
		{"backslash", add1(member{name: `m\..\x`}), "an entry called"},
		{"escape", add1(member{name: "m/\x1b[2J"}), `\x1b`},
		{"not-utf8", add1(member{name: "m/\xff"}), "an entry called"},
		{"no-name", add1(member{}), "an entry called"},
		{"long-name", add1(member{name: strings.Repeat("a", 60_000)}), "an entry called"},
		{"twice", add1(member{name: "m/" + programName, data: "{}"}), "twice"},
		{"two-programs", add1(member{name: "n/" + programName, data: "{}"}), "two programs"},
		{"link", add1(member{name: "m/link", data: "/etc/passwd", attributes: 0o120777 << 16}), "symbolic link"},
		{"encrypted", first(func(m *member) { m.flags = 1 }), "encrypted"},
		{"deflated", first(func(m *member) { m.method = 8 }), "compressed"},
		{"bomb", first(func(m *member) {
			m.tweak = func(h, c []byte) { m.method = 8; little.PutUint32(h[22:], 1<<31); little.PutUint32(c[24:], 1<<31) }
		}), "compressed"},
		{"local-name", first(func(m *member) { m.local = "m/data/weights/weight_1" }), "not what the directory says"},
		{"local-size", first(func(m *member) { m.tweak = func(h, _ []byte) { h[18] = 5 } }), "not what the directory says"},
		{"local-crc", first(func(m *member) { m.tweak = func(h, _ []byte) { h[14]++ } }), "not what the directory says"},
		{"local-method", first(func(m *member) { m.tweak = func(h, _ []byte) { h[8] = 8 } }), "not what the directory says"},
		{"local-deferred", first(func(m *member) { m.flags = 8; m.tweak = func(h, _ []byte) { clear(h[14:26]) } }), ""},
		{"local-not-deferred", first(func(m *member) { m.tweak = func(h, _ []byte) { clear(h[14:26]) } }), "not what the directory says"},
		{"overlap", with(func(all []member) []member {
			all[1].tweak = func(_, c []byte) { little.PutUint32(c[42:], 10) }
			return all
		}), "overlaps"},
		{"far", first(func(m *member) { m.tweak = func(_, c []byte) { little.PutUint32(c[42:], 1<<31) } }), "outside the file"},
		{"size-far", first(func(m *member) {
			m.tweak = func(_, c []byte) { little.PutUint32(c[20:], 1<<31); little.PutUint32(c[24:], 1<<31) }
		}), "outside the file"},
		{"size64-missing", first(func(m *member) { m.tweak = func(_, c []byte) { little.PutUint32(c[24:], 1<<32-1) } }), "lacks its size"},
		{"changed", first(func(m *member) { m.tweak = func(h, c []byte) { h[14]++; c[16]++ } }), ""}, // seen when it is read
		{"changed-program", with(func(all []member) []member {
			all[3].tweak = func(h, c []byte) { h[14]++; c[16]++ }
			return all
		}), "its CRC differs"},
		{"format", set("m/archive_format", "pt3"), `archive_format of the archive is "pt3"`},
		{"version", set("m/archive_version", "1"), "archive_version"},
		{"big-endian", set("m/byteorder", "big"), "byteorder"},
		{"long-format", set("m/archive_format", strings.Repeat("p", 100)), "at most 64"},
		{"no-format", drop("m/archive_format"), "holds no"},
		{"no-weights", drop("m/" + weightsName), "holds no"},
		{"program-not-utf8", program("s1", "\xff"), "not UTF-8"},

		// Versions and keys.
		{"major", program(`"major": 8`, `"major": 9`), "schema version 9.20"},
		{"minor-old", program(`"minor": 20`, `"minor": 13`), "schema version 8.13"},
		{"minor-old-good", program(`"minor": 20`, `"minor": 14`), ""},
		{"minor-new", program(`"minor": 20`, `"minor": 99`), ""},
		{"no-schema", program(`"schema_version"`, `"schema"`), "no schema_version"},
		{"schema-float", program(`"major": 8`, `"major": 8.0`), "integer of 64 bits"},
		{"unknown-keys", program(`"torch_version"`, `"more": [{"x": [1.5e3, null]}], "torch_version"`), ""},
		{"key-twice", program(`"torch_version"`, `"schema_version": {}, "torch_version"`), "stands twice"},
		{"key-twice-escaped", program(`"torch_version"`, `"t": 1, "\u0074": 2, "torch_version"`), "stands twice"},
		{"case", program(`"graph_module"`, `"Graph_Module"`), "no graph_module"},
		{"after", program(`"2.15.0"}`, `"2.15.0"}{}`), "something follows"},
		{"deep-unknown", program(`"torch_version"`, `"x": `+strings.Repeat("[", 9000)+strings.Repeat("]", 9000)+`, "torch_version"`), "deeper than 64"},
		{"not-json", program(`{"graph_module"`, `["graph_module"`), "wanted"},

		// Graphs.
		{"arm", program(arg, `{"as_magic": 1}`), `"as_magic", which this binary does not know`},
		{"arms", program(arg, `{"as_int": 1, "as_none": true}`), "two things at once"},
		{"no-arm", program(arg, `{}`), "is empty"},
		{"spec-arm", program(`"user_input": {`, `"oracle": {`), `an input is "oracle"`},
		{"custom-object", program(arg, `{"as_custom_obj": {"name": "o", "class_fqn": "C"}}`), "a class of its own"},
		{"custom-input", program(`"user_input": {`, `"custom_obj": {`), "a class of its own"},
		{"int-large", program(arg, `{"as_int": 9223372036854775808}`), "integer of 64 bits"},
		{"int-max", program(arg, `{"as_int": 9223372036854775807}`), ""},
		{"int-exponent", program(arg, `{"as_int": 1e3}`), "integer of 64 bits"},
		{"float-word", program(arg, `{"as_float": "inf"}`), "a number wanted"},
		{"float-nan-bare", program(arg, `{"as_float": NaN}`), "a value wanted"},
		{"float-large", program(arg, `{"as_float": 1e999}`), "a value wanted"},
		{"dtype", program(arg, `{"as_scalar_type": 99}`), "not the number of an element type"},
		{"dtype-foreign", program(arg, `{"as_scalar_type": 31}`), "float8_e4m3fnuz"},
		{"layout", program(arg, `{"as_layout": -1}`), "from 0 to 7"},
		{"deep-arguments", program(arg, deep), "nest deeper"},
		{"deep-graphs", program(arg, loop), "nest deeper"},
		{"undefined", program(`"arg": {"as_tensor": {"name": "x"}}`, `"arg": {"as_tensor": {"name": "z"}}`), "not given before"},
		{"own-output", program(`"arg": {"as_tensor": {"name": "x"}}`, `"arg": {"as_tensor": {"name": "y"}}`), "not given before"},
		{"given-twice", program(`[{"as_tensor": {"name": "y"}}], "metadata"`, `[{"as_tensor": {"name": "x"}}], "metadata"`), "given twice"},
		{"no-value", program(`"y": {"dtype"`, `"v": {"dtype"`), "nothing is known of value"},
		{"value-twice", program(`"tensor_values": {`, `"tensor_values": {"x": {"dtype": 7, "sizes": []}, `), "stands twice"},
		{"symbol-missing", program(arg, `{"as_sym_int": {"as_name": "s"}}`), "not a symbolic number"},
		{"symbol-tensor", program(arg, `{"as_sym_ints": [{"as_int": 1}, {"as_name": "x"}]}`), "not a symbolic number"},
		{"symbol-arm", program(arg, `{"as_sym_int": {"as_text": "s"}}`), `"as_text"`},
		{"expression", program(expr, `"__import__('os').system('true')"`), "not well formed"},
		{"expression-deep", program(expr, `"`+strings.Repeat("Add(", 9999)+`"`), "deeper than 64"},
		{"expression-large", program(expr, `"Integer(99999999999999999999)"`), "64 bits"},
		{"no-target", program(`"target": "torch.ops.aten.linear.default"`, `"target": ""`), "name is empty"},
		{"name-control", program(`"name": "linear"`, `"name": "a\u001b[2J"`), "control character"},
		{"name-long", program(`"name": "linear"`, `"name": "`+strings.Repeat("a", 5000)+`"`), "at most 4096"},
		{"half-pair", program(`"name": "linear"`, `"name": "\ud800"`), "surrogate"},
		{"stack", program("L__self__,,M", "L__self__"), "nn_module_stack"},
		{"inputs-missing", program(`[{"parameter": {"arg": {"name": "w"}, "parameter_name": "l.weight"}}, `, "["), "the signature has 1 inputs"},
		{"inputs-swapped", program(`"user_input": {"arg": {"as_tensor": {"name": "x"}}}`, `"user_input": {"arg": {"as_tensor": {"name": "w"}}}`), "not the same in the signature"},
		{"input-list", program(`{"inputs": [{"as_tensor": {"name": "w"}}, {"as_tensor": {"name": "x"}}]`,
			`{"inputs": [{"as_tensor": {"name": "w"}}, {"as_tensors": [{"name": "x"}]}]`), "neither a value nor a constant"},
		{"input-constant", program(`"user_input": {"arg": {"as_tensor": {"name": "x"}}}`, `"constant_input": {"name": "x", "value": {"as_int": 1}}`),
			"not the same in the signature"},
		{"output-other", program(`"user_output": {"arg": {"as_tensor": {"name": "y"}}}`, `"user_output": {"arg": {"as_tensor": {"name": "x"}}}`),
			"not the same in the signature"},
		{"output-list", program(`"user_output": {"arg": {"as_tensor": {"name": "y"}}}`, `"user_output": {"arg": {"as_tensors": [{"name": "q"}]}}`),
			"not the same in the signature"},
		{"range", program(`"max_val": null`, `"max_val": 1`), "from 2 to 1"},
		{"node-list", program(node, `[[{"target": "torch.ops.aten.linear.default"`), "wanted"},
		{"shape-differs", program(`"w": {"dtype": 7`, `"w": {"dtype": 13`), "the program says bf16"},
		{"size-arm", program(size3, `{"as_float": 3.0}]}, "y"`), `"as_float"`},
	}, hostileTensors()...)
}

func hostileTensors() []hostile {
	const strides = `"strides": [{"as_int": 3}, {"as_int": 1}]`
	const sizes = `"sizes": [{"as_int": 2}, {"as_int": 3}]`
	shaped := func(size, stride string) []byte {
		w := swap(swap(goodWeights, sizes, `"sizes": `+size), strides, `"strides": `+stride)
		return zipped(false, goodMembers(goodProgram, w)...)
	}
	return []hostile{
		{"pickled", weights(`"use_pickle": false`, `"use_pickle": true`), "stored as a pickle"},
		{"no-meta", weights(`"tensor_meta": {`, `"tensor_meta": null, "x": {`), "no tensor"},
		{"no-path", weights(`"path_name": "weight_0"`, `"path": "weight_0"`), "is missing"},
		{"path-out", weights(`"path_name": "weight_0"`, `"path_name": "../../archive_format"`), "not in the archive"},
		{"path-program", weights(`"path_name": "weight_0"`, `"path_name": "../models/model.json"`), "not in the archive"},
		{"path-missing", weights(`"path_name": "weight_0"`, `"path_name": "weight_9"`), "not in the archive"},
		{"offset-negative", weights(`"storage_offset": {"as_int": 0}`, `"storage_offset": {"as_int": -1}`), "offset is -1"},
		{"offset-beyond", weights(`"storage_offset": {"as_int": 0}`, `"storage_offset": {"as_int": 1}`), "does not fit"},
		{"offset-overflow", weights(`"storage_offset": {"as_int": 0}`, `"storage_offset": {"as_int": 9223372036854775807}`), "overflows"},
		{"stride-negative", weights(strides, `"strides": [{"as_int": 3}, {"as_int": -1}]`), "with stride -1"},
		{"stride-beyond", weights(strides, `"strides": [{"as_int": 3}, {"as_int": 2}]`), "does not fit"},
		{"stride-overflow", weights(strides, `"strides": [{"as_int": 9223372036854775807}, {"as_int": 2}]`), "overflows"},
		{"stride-missing", weights(strides, `"strides": [{"as_int": 3}]`), "2 dimensions and 1 strides"},
		{"stride-expanded", weights(strides, `"strides": [{"as_int": 0}, {"as_int": 0}]`), ""},
		{"size-negative", shaped(`[{"as_int": -2}, {"as_int": 3}]`, `[{"as_int": 3}, {"as_int": 1}]`), "dimension -2"},
		{"size-symbolic", weights(sizes, `"sizes": [{"as_expr": {"expr_str": "Symbol('s')"}}, {"as_int": 3}]`), "dimension s"},
		{"size-wraps", shaped(`[{"as_int": 8589934592}, {"as_int": 2147483648}]`, `[{"as_int": 0}, {"as_int": 0}]`), "overflows"},
		{"size-expanded", shaped(`[{"as_int": 1073741824}, {"as_int": 1024}]`, `[{"as_int": 0}, {"as_int": 0}]`), "expanded to"},
		{"ranks", shaped("["+strings.Repeat(`{"as_int": 1},`, 99)+`{"as_int": 1}]`, `[]`), "100 dimensions"},
		{"sparse", weights(`"layout": 7`, `"layout": 1`), "sparse_coo"},
		{"tensor-twice", weights(`{"config": {`, `{"config": {"l.weight": {}, `), "missing"},
		{"config-twice", weights(`{"config": {`, `{"config": {}, "config": {`), "stands twice"},
		{"no-config", weights(`"config"`, `"Config"`), "no config"},
		{"tensor-missing", weights(`"l.weight"`, `"l.bias"`), "is not stored"},
		{"tensor-shape", shaped(`[{"as_int": 3}, {"as_int": 2}]`, `[{"as_int": 2}, {"as_int": 1}]`), "stored as f32[3,2]"},
		{"tensor-both", set("m/"+constsName, goodWeightsAt("weight_0")), "not in the archive"},
		{"tensor-both-stored", with(func(all []member) []member {
			all[2].data = goodWeightsAt("t")
			return append(all, member{name: "m/data/constants/t", data: strings.Repeat("\x00", 24)})
		}), "stands twice"},
		{"storage-empty", first(func(m *member) { m.data = "" }), ""}, // as the meta device leaves it
		{"storage-short", first(func(m *member) { m.data = "1234" }), "does not fit"},
	}
}

func goodWeightsAt(path string) string { return swap(goodWeights, "weight_0", path) }

// Every row is an error with a code and a fix, or an archive whose tensors can be asked for; in
// bounded time and memory.
func TestHostile(t *testing.T) {
	rows := hostiles()
	if len(rows) < 100 {
		t.Fatalf("only %d rows", len(rows))
	}
	seen := map[string]bool{}
	for _, row := range rows {
		if seen[row.name] {
			t.Errorf("%s stands twice", row.name)
		}
		seen[row.name] = true
		t.Run(row.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			began := time.Now()
			a, err := Parse("hostile", row.data)
			runtime.ReadMemStats(&after)
			if spent := after.TotalAlloc - before.TotalAlloc; spent > 1<<20+50*uint64(len(row.data)) {
				t.Errorf("%d bytes took %d of memory", len(row.data), spent)
			}
			if spent := time.Since(began); spent > 5*time.Second {
				t.Errorf("took %v", spent)
			}
			if row.words == "" {
				if err != nil {
					t.Fatal(err)
				}
				exercise(t, a)
				return
			}
			if err == nil {
				t.Fatal("it was taken")
			}
			e := diag.From(err)
			if e.Code != codeFormat || e.Fix == "" || !strings.HasPrefix(e.Where, "hostile") ||
				!strings.Contains(e.What+e.Cause+e.Fix, row.words) {
				t.Errorf("%s: what %q, cause %q, fix %q, where %q", e.Code, e.What, e.Cause, e.Fix, e.Where)
			}
		})
	}
}

// exercise does with an archive what its user may.
func exercise(t *testing.T, a *Archive) {
	t.Helper()
	_ = a.Tied()
	_ = printed(a.Program)
	for _, x := range a.Tensors() {
		data, err := x.Bytes()
		if err != nil {
			if e := diag.From(err); e.Code == diag.Internal {
				t.Error(err)
			}
			continue
		}
		if int64(len(data)) != x.Shape().Bytes() {
			t.Errorf("%s: %d bytes of %v", x.Name, len(data), x.Shape())
		}
		if err := x.Read(make([]float32, x.Shape().Elements())); err != nil && diag.From(err).Code != codeType {
			t.Error(err)
		}
	}
}

func TestNoPlainFile(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, "/dev/zero", dir, filepath.Join(dir, "absent")} {
		if _, err := Open(path); err == nil || diag.From(err).Code == diag.Internal {
			t.Errorf("%s: %v", path, err)
		}
	}
	sparse := filepath.Join(dir, "sparse") // 8 TiB of nothing
	if err := os.WriteFile(sparse, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(sparse, 8<<40); err != nil {
		t.Skip(err)
	}
	if _, err := Open(sparse); err == nil || !strings.Contains(err.Error(), "not a zip archive") {
		t.Error(err)
	}
}

// The worst texts of a few megabytes: what is kept of them is a small multiple.
func TestMemory(t *testing.T) {
	const n = 100_000
	for name, text := range map[string]string{
		"modules": swap(goodProgram, "L__self__,,M", strings.Repeat(",,M;", n)+",,M"),
		"ints":    swap(goodProgram, arg, `{"as_int_lists": [`+strings.Repeat("[],", n)+"[]]}"),
		"sizes":   swap(goodProgram, `{"as_int": 3}]}, "y"`, strings.Repeat(`{"as_int":1},`, n)+`{"as_int": 3}]}, "y"`),
		"nodes":   swap(goodProgram, `"nodes": [`, `"nodes": [`+strings.Repeat(`{"target":"a"},`, n)),
		"expr":    swap(goodProgram, "Symbol('s1', integer=True)", "Add("+strings.Repeat("oo,", n)+"oo)"),
		"leaves": swap(goodProgram, `"module_call_graph": []`, `"module_call_graph": [{"fqn": "", "signature": {"out_spec": "[1, {\"type\": \"a\", `+
			`\"context\": null, \"children_spec\": [`+strings.Repeat(`{\"type\": null}, `, n)+`{\"type\": null}]}]"}}]`),
	} {
		data := zipped(false, goodMembers(text, goodWeights)...)
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		a, err := Parse(name, data)
		runtime.ReadMemStats(&after)
		if spent := after.TotalAlloc - before.TotalAlloc; spent > 128*uint64(len(data)) {
			t.Errorf("%s: %d bytes took %d in all", name, len(data), spent)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		kept := int64(after.HeapAlloc) - int64(before.HeapAlloc)
		if kept > 32*int64(len(data)) {
			t.Errorf("%s: %d bytes keep %d", name, len(data), kept)
		}
		t.Logf("%s: %d bytes, %.1f times kept: %v", name, len(data), float64(kept)/float64(len(data)), err)
		runtime.KeepAlive(a)
	}
}

package run

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A typ is the type of a value: its element, whether elements are pointers or descriptors, and its
// shape, nil for a scalar.
type typ struct {
	elem  string
	kind  string // "", "ptr" or "desc"
	shape []int
}

// An op is one operation of the text.
type op struct {
	name    string
	results []string
	args    []string // names of operands, in the order of the text
	quoted  []string // strings, without their quotes
	text    string   // everything behind the name, strings taken out
	in      []typ    // types of operands, as far as the text lists them
	out     []typ
	params  []string // of the region: the counter and carried values of a loop, both sides of a reduce
	regions [][]*op
	line    int
}

// attr is an integer attribute.
func (o *op) attr(name string) (int, bool) {
	_, rest, ok := strings.Cut(o.text, name+" = ")
	if !ok {
		return 0, false
	}
	end := strings.IndexFunc(rest, func(r rune) bool { return r != '-' && (r < '0' || r > '9') })
	n, err := strconv.Atoi(rest[:max(end, 0)])
	return n, err == nil
}

// list is an attribute array<i32: 1, 0>.
func (o *op) list(name string) (list []int) {
	_, rest, _ := strings.Cut(o.text, name+" = array<i32: ")
	rest, _, _ = strings.Cut(rest, ">")
	for s := range strings.SplitSeq(rest, ", ") {
		n, err := strconv.Atoi(s)
		if err != nil {
			return nil
		}
		list = append(list, n)
	}
	return list
}

// A parser goes through the lines of a text.
type parser struct {
	lines []string
	at    int
}

// parse gives the names of a kernel's pointers and the operations of its body.
func parse(text string) (pointers []string, body []*op, err error) {
	p := &parser{lines: strings.Split(text, "\n")}
	for ; p.at < len(p.lines); p.at++ {
		if head := strings.TrimSpace(p.lines[p.at]); strings.HasPrefix(head, "tt.func ") {
			for _, a := range strings.Split(head, "!tt.ptr<")[:strings.Count(head, "!tt.ptr<")] {
				a = a[strings.LastIndexByte(a, '%'):]
				pointers = append(pointers, strings.TrimSuffix(a, ": "))
			}
			p.at++
			body, err = p.block()
			return pointers, body, err
		}
	}
	return nil, nil, fmt.Errorf("the text has no tt.func")
}

// block reads operations up to the end of a region, and the parameters before them, if any.
func (p *parser) block() (list []*op, err error) {
	for p.at < len(p.lines) {
		line := strings.TrimSpace(p.lines[p.at])
		switch {
		case line == "":
			p.at++
		case strings.HasPrefix(line, "}"):
			return list, nil
		default:
			o, err := p.op(line)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w: %s", p.at+1, err, line)
			}
			list = append(list, o)
		}
	}
	return nil, fmt.Errorf("a region does not end")
}

// op reads one operation, with its regions.
func (p *parser) op(line string) (*op, error) {
	o := &op{line: p.at + 1}
	p.at++
	rest := line
	if strings.HasPrefix(line, "%") {
		names, after, ok := strings.Cut(line, " = ")
		if !ok {
			return nil, fmt.Errorf("a value without an operation")
		}
		rest = after
		for n := range strings.SplitSeq(names, ", ") {
			name, times, several := strings.Cut(n, ":")
			if !several {
				o.results = append(o.results, name)
				continue
			}
			k, err := strconv.Atoi(times)
			if err != nil {
				return nil, err
			}
			for i := range k {
				o.results = append(o.results, fmt.Sprintf("%s#%d", name, i))
			}
		}
	}
	rest = o.takeName(rest)
	if strings.HasSuffix(rest, "{") {
		var err error
		if rest, err = p.regions(o, rest); err != nil {
			return nil, err
		}
	}
	o.text = rest
	o.operands()
	return o, o.types()
}

// takeName takes the name of an operation off, and the strings behind it out.
func (o *op) takeName(rest string) string {
	if strings.HasPrefix(rest, `"`) { // the generic form
		end := strings.IndexByte(rest[1:], '"') + 1
		o.name, rest = rest[1:end], rest[end+1:]
	} else if at := strings.IndexAny(rest, " ("); at >= 0 {
		o.name, rest = rest[:at], rest[at:]
	} else {
		o.name, rest = rest, ""
	}
	for {
		from := strings.IndexByte(rest, '"')
		if from < 0 {
			return rest
		}
		to := from + 1 + strings.IndexByte(rest[from+1:], '"')
		text, err := strconv.Unquote(rest[from : to+1])
		if err != nil {
			return rest
		}
		o.quoted = append(o.quoted, text)
		rest = rest[:from] + "§" + rest[to+1:]
	}
}

// regions reads what stands between the braces of an operation.
func (p *parser) regions(o *op, rest string) (string, error) {
	if strings.HasPrefix(o.name, "scf.for") { // %i = %from to %to step %by iter_args(%a = %x) ...
		o.params = append(o.params, strings.TrimSpace(rest[:strings.Index(rest, " = ")]))
		if _, carried, ok := strings.Cut(rest, "iter_args("); ok {
			carried, _, _ = strings.Cut(carried, ")")
			for pair := range strings.SplitSeq(carried, ", ") {
				name, _, _ := strings.Cut(pair, " = ")
				o.params = append(o.params, name)
			}
		}
	}
	if head := strings.TrimSpace(p.lines[p.at]); strings.HasPrefix(head, "^bb0(") {
		for part := range strings.SplitSeq(strings.TrimSuffix(head[5:], "):"), ", ") {
			name, _, _ := strings.Cut(part, ":")
			o.params = append(o.params, name)
		}
		p.at++
	}
	for {
		body, err := p.block()
		if err != nil {
			return "", err
		}
		o.regions = append(o.regions, body)
		end := strings.TrimSpace(p.lines[p.at])
		p.at++
		if end != "} else {" {
			return rest + " " + end, nil
		}
	}
}

// operands finds the names of operands: those before the types, less the parameters.
func (o *op) operands() {
	head := o.text
	if at := strings.LastIndex(head, " : "); at >= 0 {
		head = head[:at]
	}
	for {
		at := strings.IndexByte(head, '%')
		if at < 0 {
			return
		}
		end := at + 1
		for end < len(head) && (head[end] == '#' || head[end] == '_' || isWord(head[end])) {
			end++
		}
		name := head[at:end]
		if !slices.Contains(o.params, name) {
			o.args = append(o.args, name)
		}
		head = head[end:]
	}
}

func isWord(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// types reads the types behind " : ". The result's is the last: behind an arrow or "to", or the
// operands' own.
func (o *op) types() error {
	at := strings.LastIndex(o.text, " : ")
	if o.name == "scf.for" || o.name == "tt.make_tensor_descriptor" || at < 0 {
		return nil
	}
	list := o.text[at+3:]
	from, to, arrow := strings.Cut(list, " -> ")
	if !arrow {
		if from, to, arrow = strings.Cut(list, " to "); !arrow {
			to = from
		}
	}
	var err error
	if o.in, err = readTypes(from); err != nil {
		return err
	}
	o.out, err = readTypes(to)
	return err
}

// readTypes reads a list of types.
func readTypes(text string) (list []typ, err error) {
	depth, from := 0, 0
	plain := strings.NewReplacer("(", "", ")", "", "{", "", "}", "", " * ", ", ")
	text = strings.TrimSpace(plain.Replace(text))
	for i := 0; i <= len(text); i++ {
		switch {
		case i == len(text) || text[i] == ',' && depth == 0:
			t, err := readType(strings.TrimSpace(text[from:i]))
			if err != nil {
				return nil, err
			}
			list, from = append(list, t), i+1
		case text[i] == '<':
			depth++
		case text[i] == '>':
			depth--
		}
	}
	return list, nil
}

// readType reads tensor<32x8x!tt.ptr<bf16>>, !tt.tensordesc<128x64xbf16>, or a scalar.
func readType(text string) (t typ, err error) {
	if inner, ok := strings.CutPrefix(text, "!tt.tensordesc<"); ok {
		t, err = readType("tensor<" + inner)
		t.kind = "desc"
		return t, err
	}
	if inner, ok := strings.CutPrefix(text, "tensor<"); ok {
		text = strings.TrimSuffix(inner, ">")
		t.shape = []int{}
		for {
			size, rest, ok := strings.Cut(text, "x")
			n, err := strconv.Atoi(size)
			if !ok || err != nil {
				break
			}
			t.shape, text = append(t.shape, n), rest
		}
	}
	if inner, ok := strings.CutPrefix(text, "!tt.ptr<"); ok {
		t.kind, text = "ptr", strings.TrimSuffix(inner, ">")
	}
	switch text {
	case "i1", "i8", "ui8", "i16", "i32", "i64", "f32", "bf16", "f8E4M3FN", "f8E5M2":
		t.elem = text
		return t, nil
	}
	return t, fmt.Errorf("unknown type %q", text)
}

package tokenizer

import (
	"bytes"
	"unicode/utf8"
)

// An addedToken is a token that is split off a text before anything else is done to it.
type addedToken struct {
	ID      int32  `json:"id"`
	Content string `json:"content"`
	// SingleWord asks that no word character stands beside the token.
	SingleWord bool `json:"single_word"`
	// LStrip and RStrip let the token have the spaces on that side.
	LStrip bool `json:"lstrip"`
	RStrip bool `json:"rstrip"`
	// Normalized tokens are looked for in the normalized text.
	Normalized bool `json:"normalized"`
	// Special tokens are left out when text is decoded, and can be read as plain text.
	Special bool `json:"special"`
}

// A matcher finds the leftmost, and there the longest, of a set of strings.
type matcher struct {
	nodes []matchNode
	only  int // the one byte that all strings begin with, or -1
}

// A matchNode is a state of a trie. Most states have few edges; one with many has a table.
type matchNode struct {
	edges []matchEdge
	table *[256]int32 // the next node by byte, or -1; nil if edges has them
	value int32       // of the string that ends here, or -1
}

// maxEdges is how many edges are searched one by one.
const maxEdges = 4

type matchEdge struct {
	label byte
	to    int32
}

func newMatcher() *matcher {
	m := &matcher{only: -1}
	m.node()
	m.nodes[0].widen()
	return m
}

// node makes a new node.
func (m *matcher) node() int32 {
	m.nodes = append(m.nodes, matchNode{value: -1})
	return int32(len(m.nodes) - 1)
}

// widen gives a node its table.
func (n *matchNode) widen() {
	n.table = new([256]int32)
	for c := range n.table {
		n.table[c] = -1
	}
	for _, e := range n.edges {
		n.table[e.label] = e.to
	}
	n.edges = nil
}

// add puts a string, which is not empty, into the set and reports whether it is new.
func (m *matcher) add(text string, value int32) bool {
	if len(m.nodes) == 1 {
		m.only = int(text[0])
	} else if m.only != int(text[0]) {
		m.only = -1
	}
	at := int32(0)
	for i := range len(text) {
		next := m.next(at, text[i])
		if next < 0 {
			next = m.node()
			m.nodes[at].link(text[i], next)
		}
		at = next
	}
	isNew := m.nodes[at].value < 0
	m.nodes[at].value = value
	return isNew
}

func (n *matchNode) link(c byte, to int32) {
	if n.table == nil && len(n.edges) == maxEdges {
		n.widen()
	}
	if n.table != nil {
		n.table[c] = to
	} else {
		n.edges = append(n.edges, matchEdge{c, to})
	}
}

// begins reports whether a string begins with a byte.
func (m *matcher) begins(c byte) bool { return m.nodes[0].table[c] >= 0 }

// next gives the node that a byte leads to, or -1.
func (m *matcher) next(at int32, c byte) int32 {
	n := &m.nodes[at]
	if n.table != nil {
		return n.table[c]
	}
	for _, e := range n.edges {
		if e.label == c {
			return e.to
		}
	}
	return -1
}

// longest gives the length and the value of the longest string that b begins with; the length is 0
// without a match.
func (m *matcher) longest(b []byte) (length int, value int32) {
	at := int32(0)
	for i, c := range b {
		if at = m.next(at, c); at < 0 {
			break
		}
		if v := m.nodes[at].value; v >= 0 {
			length, value = i+1, v
		}
	}
	return length, value
}

// find gives the first match in b from i on.
func (m *matcher) find(b []byte, i int) (start, end int, value int32, ok bool) {
	for ; i < len(b); i++ {
		if m.only >= 0 {
			skip := bytes.IndexByte(b[i:], byte(m.only))
			if skip < 0 {
				break
			}
			i += skip
		} else if !m.begins(b[i]) {
			continue
		}
		if n, value := m.longest(b[i:]); n > 0 {
			return i, i + n, value, true
		}
	}
	return 0, 0, 0, false
}

// An addedSet is the added tokens that are looked for in one of the two passes.
type addedSet struct {
	match  *matcher // its values are places in tokens
	tokens []addedToken
	table  *classTable
}

// split calls token for each added token in b and rest for the text between them; rest gets the
// place where its part begins. A match that is refused (beside a word, or special where special
// tokens, or this one, are plain text) hides matches that overlap it, as it does in the library.
func (s *addedSet) split(b []byte, literal bool, plain func(int) bool, token func(int32),
	rest func([]byte, int)) {
	done := 0
	for i := 0; ; {
		start, end, at, ok := s.match.find(b, i)
		if !ok {
			break
		}
		i = end
		t := &s.tokens[at]
		isText := t.Special && (literal || plain != nil && plain(start))
		if isText || t.SingleWord && !s.alone(b, start, end) {
			continue
		}
		if t.LStrip {
			start = s.spacesBefore(b, start)
		}
		if t.RStrip {
			end = s.table.run(b, end, space)
		}
		if done < start {
			rest(b[done:start], done)
		}
		token(t.ID)
		done = end
	}
	if done != len(b) {
		rest(b[done:], done)
	}
}

func (s *addedSet) alone(b []byte, start, end int) bool {
	if start > 0 {
		if r, _ := utf8.DecodeLastRune(b[:start]); s.table.of(r)&word != 0 {
			return false
		}
	}
	if end < len(b) {
		if c, _ := s.table.at(b, end); c&word != 0 {
			return false
		}
	}
	return true
}

// spacesBefore gives the start of the run of spaces that ends at b[i].
func (s *addedSet) spacesBefore(b []byte, i int) int {
	for i > 0 {
		r, n := utf8.DecodeLastRune(b[:i])
		if s.table.of(r)&space == 0 {
			break
		}
		i -= n
	}
	return i
}

package tokenizer

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// A refusal is a change to a small tokenizer.json that makes it one that is not read.
type refusal struct {
	part  string // a top-level key, or "model.key"
	value string
	where string // the place that the error names
	what  string // and a part of what it says
}

const smallModel = `"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]`

// file gives the tokenizer.json with the change made.
func (r refusal) file() string {
	if key, ok := strings.CutPrefix(r.part, "model."); ok {
		return `{"model":{` + smallModel + `,"` + key + `":` + r.value + `}}`
	}
	return `{"model":{` + smallModel + `},"` + r.part + `":` + r.value + `}`
}

var refused = []refusal{
	{"version", `"2.0"`, ".version", `version "2.0"`},
	{"truncation", `{"max_length":1}`, ".truncation", "truncation of every text"},
	{"padding", `{}`, ".padding", "padding of every text"},
	{"added_tokens", `[{"id":7,"content":"x"}]`, ".added_tokens[0]", `has the id 7, but the library would give it 3`},
	{"added_tokens", `[{"id":3,"content":"x"},{"id":3,"content":"x","special":true}]`, ".added_tokens[1]", "twice"},
	{"added_tokens", `7`, "", "not a tokenizer.json"},

	{"normalizer", `{"type":"Lowercase"}`, ".normalizer", "normalizer Lowercase is not known"},
	{"normalizer", `{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Precompiled","precompiled_charsmap":""}]}`, ".normalizer.normalizers[1]", "Precompiled"},
	{"normalizer", `{"type":"Replace","pattern":{"Regex":" +"},"content":" "}`, ".normalizer.pattern", "regular expression"},
	{"normalizer", `{"type":"Prepend","prepend":"x","twice":true}`, ".normalizer", `setting "twice"`},
	{"normalizer", `{"no type":1}`, ".normalizer", "no type"},
	{"normalizer", `[]`, ".normalizer", "cannot be read"},
	{"normalizer", `{"type":"Sequence","normalizers":7}`, ".normalizer", "cannot be read"},

	{"pre_tokenizer", `{"type":"Whitespace"}`, ".pre_tokenizer", "pre-tokenizer Whitespace is not known"},
	{"pre_tokenizer", `{"type":"Split","pattern":{"Regex":"\\d{3}"},"behavior":"Isolated","invert":false}`, ".pre_tokenizer.pattern", `unknown pattern: \d{3}`},
	{"pre_tokenizer", `{"type":"Split","pattern":{"String":" "},"behavior":"Shuffled","invert":false}`, ".pre_tokenizer.behavior", "Shuffled"},
	{"pre_tokenizer", `{"type":"Split","pattern":{},"behavior":"Isolated","invert":false}`, ".pre_tokenizer.pattern", "no pattern"},
	{"pre_tokenizer", `{"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits","individual_digits":true}]}`, ".pre_tokenizer.pretokenizers[1]", "after it has converted them to bytes"},
	{"pre_tokenizer", `{"type":"Punctuation","behavior":"x"}`, ".pre_tokenizer.behavior", `"x"`},
	{"pre_tokenizer", `{"type":"Metaspace","replacement":"__"}`, ".pre_tokenizer.replacement", "__"},
	{"pre_tokenizer", `{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}`, ".pre_tokenizer.prepend_scheme", "last"},
	{"pre_tokenizer", `{"type":"Metaspace","replacement":"_","add_prefix_space":false}`, ".pre_tokenizer.add_prefix_space", "contradicts"},

	{"post_processor", `{"type":"RobertaProcessing","sep":["</s>",2],"cls":["<s>",0]}`, ".post_processor", "post-processor RobertaProcessing is not known"},
	{"post_processor", `{"type":"TemplateProcessing","single":[{"Sequence":{"id":"B","type_id":0}}],"special_tokens":{}}`, ".post_processor.single[0]", "part that is not known"},
	{"post_processor", `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"a","type_id":0}}],"special_tokens":{}}`, ".post_processor.single[0]", `no ids for "a"`},
	{"post_processor", `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"a","type_id":0}}],"special_tokens":{"a":{"ids":[9]}}}`, ".post_processor.single[0]", "id 9"},
	{"post_processor", `{"type":"TemplateProcessing","single":[],"special_tokens":{}}`, ".post_processor.single", "leaves the text out"},
	{"post_processor", `{"type":"Sequence","processors":[{"type":"Nonsense"}]}`, ".post_processor.processors[0]", "Nonsense"},

	{"decoder", `{"type":"WordPiece","prefix":"##","cleanup":true}`, ".decoder", "decoder WordPiece is not known"},
	{"decoder", `{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]}`, ".decoder.decoders[1]", "stands where it is not known"},
	{"decoder", `{"type":"Sequence","decoders":[{"type":"ByteLevel"},{"type":"Fuse"}]}`, ".decoder.decoders[0]", "stands where it is not known"},
	{"decoder", `{"type":"Sequence","decoders":[{"type":"Strip","content":" ","start":1,"stop":0}]}`, ".decoder.decoders[0]", "stands where it is not known"},
	{"decoder", `{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":1}]}`, ".decoder.decoders[1]", "Strip"},

	{"model.dropout", `0.1`, ".model.dropout", "at random"},
	{"model.unk_token", `"<unk>"`, ".model.unk_token", "not in the vocabulary"},
	{"model.continuing_subword_prefix", `"##"`, ".model.continuing_subword_prefix", "##"},
	{"model.end_of_word_suffix", `"</w>"`, ".model.end_of_word_suffix", "</w>"},
	{"model.merges", `[["a","c"]]`, ".model.merges[0]", "not in the vocabulary"},
	{"model.merges", `["a b c"]`, ".model", "not two tokens"},
	{"model.merges", `[["a"]]`, ".model", "1 tokens"},
	{"model.vocab", `{"a":0,"b":0}`, ".model.vocab", "both have the id 0"},
	{"model.vocab", `{"a":-1}`, ".model.vocab", "id -1"},
	{"model.vocab", `{"a":99999999}`, ".model.vocab", "id 99999999"},
	{"model.vocab", `{"a":0.5}`, ".model", "cannot be read"},
	{"model.surprise", `1`, ".model", `setting "surprise"`},
	{"pre_tokenizer", `{"type":"ByteLevel","trim":1}`, ".pre_tokenizer", `setting "trim"`},
	{"model.type", `"Unigram","unk_id":0`, ".model.type", "Unigram"},
	{"model.type", `"Unigram"`, ".model.type", "Unigram"},
	{"model", `null`, ".model", "no model"},
	{"model.byte_fallback", `true},"pre_tokenizer":{"type":"ByteLevel"`, ".model.byte_fallback", "lacks bytes"},
}

// What is not done is refused with the place in the file and what to do, and never done otherwise.
func TestFilesThatAreRefused(t *testing.T) {
	if _, err := Parse([]byte(`{"model":{` + smallModel + `}}`)); err != nil {
		t.Fatalf("the file without a change: %v", err)
	}
	for _, r := range refused {
		_, err := Parse([]byte(r.file()))
		e, ok := errors.AsType[*diag.Error](err)
		if !ok || e.Code != diag.BadInput || e.Where != r.where || e.Fix == "" ||
			!strings.Contains(e.What, r.what) {
			t.Errorf("%s: %v", r.file(), err)
		}
	}
}

func TestFilesThatAreNotTokenizers(t *testing.T) {
	for _, data := range []string{"", " ", "\n", "x", "[]", `"x"`, "{}", `{"model":{"type":"BPE"}} x`, "\n\x05hello", "\x00\x01", "\n{\n\x00"} {
		_, err := Parse([]byte(data))
		if e, ok := errors.AsType[*diag.Error](err); !ok || e.Fix == "" {
			t.Errorf("%q: %v", data, err)
		}
	}
}

// The first piece of this model has 123 bytes, so that the file begins like JSON after a blank
// line.
func TestModelThatLooksLikeJSON(t *testing.T) {
	if isPieceModel([]byte("\n{\"model\": 1}")) || isPieceModel([]byte("\n {}")) || !isPieceModel([]byte("\n{\nxyz")) {
		t.Error("the formats are mixed up")
	}
}

func TestModelsThatAreRefused(t *testing.T) {
	good, err := os.ReadFile("testdata/spm_bpe.model")
	if err != nil {
		t.Fatal(err)
	}
	field := func(num byte, body ...byte) []byte { return append([]byte{num<<3 | 2, byte(len(body))}, body...) }
	piece := func(text string, kind byte) []byte { return field(1, append(field(1, []byte(text)...), 3<<3, kind)...) }
	trainer := func(num, value byte) []byte { return field(2, num<<3, value) }
	for _, c := range []struct {
		data []byte
		what string
	}{
		{good[:len(good)/2], "not a SentencePiece model"},
		{slices.Concat(good, trainer(3, 3)), "neither unigram nor BPE"},
		{slices.Concat(good, trainer(3, 4)), "neither unigram nor BPE"},
		{slices.Concat(good, piece("<unk>", 2)), "there twice"},
		{slices.Concat(good, piece("<unk2>", 2)), "second unknown piece"},
		{slices.Concat(good, piece("", 1)), "is empty"},
		{slices.Concat(good, piece("never", 5)), "is of a kind that is not known"},
		{slices.Concat(good, piece("<0x7>", 6)), "is not a byte"},
		{slices.Concat(good, piece("q€q", 1)), "is not a piece"},
		{slices.Concat(good, field(3, field(2, 1, 2)...)), "truncated"},
		{slices.Concat(good, field(3, field(2, 9, 0, 0, 0, 1, 2, 3, 4)...)), "truncated"},
		{slices.Concat(good, field(5, field(2, 1, 2)...)), "when it decodes"},
		{piece("a", 1), "lacks its unknown piece"},
	} {
		_, err := Parse(c.data)
		if e, ok := errors.AsType[*diag.Error](err); !ok || e.Fix == "" || !strings.Contains(e.What, c.what) {
			t.Errorf("%q: %v", c.what, err)
		}
	}
}

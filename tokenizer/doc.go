// Package tokenizer turns text into token ids and back, exactly as the library does that a model
// was trained with.
//
// It reads the two files that models come with: tokenizer.json of Hugging Face (byte-level BPE as
// in GPT-2, Llama 3, Qwen and Mistral Nemo; BPE over characters with byte fallback as in Llama 2,
// Mistral, Gemma and Phi-3) and tokenizer.model of SentencePiece (BPE and unigram). A file that
// asks for something else is refused with the place in the file, because a token that differs
// silently spoils a training run without a trace. [Train] learns a byte-level BPE from text and
// writes it as a tokenizer.json that the library loads.
//
// A text passes four stages, named as in the file: added tokens are split off, the rest is
// normalized (normal.go), split into words (split.go; scan.go for the patterns whose look-ahead
// Go's regexp does not have) and each word is merged into tokens (bpe.go). What was computed for a
// word is kept, since most words of a text were seen before.
//
// Classes of characters and normal forms come from unicode.txt and not from Go's tables: the
// version of Unicode is a part of the tokenizer, and ids must not change with a Go release.
//
// Text that is not valid UTF-8 is read as if each maximal broken sequence were U+FFFD, which is
// what Python's decode with errors="replace" hands to the library.
package tokenizer

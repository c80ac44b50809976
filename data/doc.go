// Package data turns files of text into rows of tokens that a training step takes.
//
// [Open] finds the files of every source (files.go), reads documents from them (read.go, table.go,
// megatron.go; rows through package chat, chats through template.go), and writes their tokens once
// into a cache that is mapped from then on (build.go, cache.go). A [Loader] splits the tokens of a
// source into rows (pack.go) and puts the rows into an order (order.go). A [Stream] takes batches
// that another program has made (stream.go).
//
// The documents of a source stand one after the other, each closed by the token that ends a text.
// Row r holds the tokens from r·seq on, seq of them, and one more as the last label. A label is -1
// where nothing is to be learned: where the next token belongs to another document, or was not
// written by the assistant of a chat. Positions and segments begin again with every document, so
// that attention can stop at its edge.
//
// What comes next is a pure function of a [Position], which has one integer for each source: the
// rows that were taken from it. It does not know how many ranks there are, so that a run may
// resume on another machine and see the same batches. Rows are shuffled by a keyed permutation
// that needs no memory, another one in each epoch. The source of a row is chosen so that the rows
// taken from a source are, at any moment, less than one row away from its share.
//
// The name of a special token in a document is read as plain text, never as the token: text that
// strangers wrote must not end documents.
package data

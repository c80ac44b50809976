// Package jinja turns a chat template and messages into text.
//
// Models bring the template of their chats as a program in Jinja, which transformers runs with the
// Python library. This package runs the part of the language that such templates use, as
// transformers sets it up: trim_blocks and lstrip_blocks, loop controls, the generation tag, tojson
// that keeps the order of keys, raise_exception and strftime_now. What it does not know it refuses
// by name when the template is read ([Parse]), never by other output.
//
// A template comes from strangers. [Template.Render] counts steps, bytes and nesting, and ends with
// an error where one of them is more than chats need; it reads no file, and the only clock it has
// is the one that it is given.
package jinja

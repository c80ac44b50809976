// Package flat turns a Go value into bytes and back, for two processes of one binary: what they
// mean is known from the type alone, which both have. It stands for encoding/gob, whose
// descriptions of types nobody here reads, and which costs the binary a third of a megabyte.
//
// Structs give their exported fields in order, numbers are varints, floats have their bits (NaN
// included), a nil pointer, slice or map stays nil. Slices of numbers are copied as they stand.
// An any holds a bool, a number or a string; functions, channels and all else are refused.
package flat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
)

// errShort is what bytes of another type, or of another version of the binary, give.
var errShort = errors.New("the bytes end before the value does")

// Write writes a value and its length.
func Write(w io.Writer, v any) error {
	buf, err := Append(make([]byte, 8), v)
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(buf, uint64(len(buf)-8))
	_, err = w.Write(buf)
	return err
}

// Read reads what Write wrote into the value that v points to.
func Read(r io.Reader, v any) error {
	var size [8]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint64(size[:])
	if n > math.MaxInt32*64 { // 128 GB: no value, but bytes of something else
		return errShort
	}
	buf := make([]byte, n)
	if _, err := io.ReadFull(r, buf); err != nil {
		return err
	}
	return Parse(buf, v)
}

// Append appends the bytes of a value, or of what it points to.
func Append(buf []byte, v any) ([]byte, error) {
	of := reflect.ValueOf(v)
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	return appendValue(buf, of)
}

// Parse reads the bytes that Append gave for a value of the type that v points to.
func Parse(data []byte, v any) error {
	r := &reader{data}
	if err := r.value(reflect.ValueOf(v).Elem()); err != nil {
		return err
	}
	if len(r.data) > 0 {
		return fmt.Errorf("%d bytes follow the value", len(r.data))
	}
	return nil
}

func appendValue(buf []byte, v reflect.Value) (_ []byte, err error) {
	switch v.Kind() {
	case reflect.Bool:
		if v.Bool() {
			return append(buf, 1), nil
		}
		return append(buf, 0), nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return binary.AppendVarint(buf, v.Int()), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return binary.AppendUvarint(buf, v.Uint()), nil
	case reflect.Float32, reflect.Float64:
		return binary.LittleEndian.AppendUint64(buf, math.Float64bits(v.Float())), nil
	case reflect.String:
		buf = binary.AppendUvarint(buf, uint64(v.Len()))
		return append(buf, v.String()...), nil
	case reflect.Pointer:
		if v.IsNil() {
			return append(buf, 0), nil
		}
		return appendValue(append(buf, 1), v.Elem())
	case reflect.Struct:
		for _, field := range fields(v) {
			if buf, err = appendValue(buf, field); err != nil {
				return nil, err
			}
		}
		return buf, nil
	case reflect.Slice, reflect.Array:
		return appendList(buf, v)
	case reflect.Map:
		return appendMap(buf, v)
	case reflect.Interface:
		return appendAny(buf, v.Elem())
	}
	return nil, fmt.Errorf("a %s cannot be sent", v.Type())
}

// loose are the types that an any may hold, by the byte that stands before the value; 0 is nil.
var loose = []reflect.Type{nil, reflect.TypeFor[bool](), reflect.TypeFor[int](),
	reflect.TypeFor[int64](), reflect.TypeFor[float64](), reflect.TypeFor[string]()}

func appendAny(buf []byte, v reflect.Value) ([]byte, error) {
	if !v.IsValid() {
		return append(buf, 0), nil
	}
	at := slices.Index(loose, v.Type())
	if at < 0 {
		return nil, fmt.Errorf("a %s in an interface cannot be sent", v.Type())
	}
	return appendValue(append(buf, byte(at)), v)
}

// fields are the exported fields of a struct.
func fields(v reflect.Value) []reflect.Value {
	list := make([]reflect.Value, 0, v.NumField())
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.IsExported() {
			list = append(list, v.Field(i))
		}
	}
	return list
}

// appendList appends the length of a slice plus one, 0 for nil, and its elements.
func appendList(buf []byte, v reflect.Value) (_ []byte, err error) {
	if v.Kind() == reflect.Slice {
		if v.IsNil() {
			return append(buf, 0), nil
		}
		buf = binary.AppendUvarint(buf, uint64(v.Len())+1)
		switch s := v.Interface().(type) {
		case []byte:
			return append(buf, s...), nil
		case []int32, []int64, []float32, []float64:
			buf = slices.Grow(buf, 8*v.Len())
			return binary.Append(buf, binary.LittleEndian, s)
		}
	}
	for i := range v.Len() {
		if buf, err = appendValue(buf, v.Index(i)); err != nil {
			return nil, err
		}
	}
	return buf, nil
}

// appendMap appends the pairs of a map in the order of their bytes, which is always the same.
func appendMap(buf []byte, v reflect.Value) ([]byte, error) {
	if v.IsNil() {
		return append(buf, 0), nil
	}
	var pairs []string
	for pair := v.MapRange(); pair.Next(); {
		b, err := appendValue(nil, pair.Key())
		if err == nil {
			b, err = appendValue(b, pair.Value())
		}
		if err != nil {
			return nil, err
		}
		pairs = append(pairs, string(b))
	}
	slices.Sort(pairs)
	buf = binary.AppendUvarint(buf, uint64(len(pairs))+1)
	return append(buf, strings.Join(pairs, "")...), nil
}

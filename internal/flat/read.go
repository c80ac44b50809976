package flat

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
)

// A reader has the bytes that are left.
type reader struct{ data []byte }

// take gives the next n bytes.
func (r *reader) take(n uint64) ([]byte, error) {
	if n > uint64(len(r.data)) {
		return nil, errShort
	}
	b := r.data[:n]
	r.data = r.data[n:]
	return b, nil
}

func (r *reader) uvarint() (uint64, error) {
	u, n := binary.Uvarint(r.data)
	if n <= 0 {
		return 0, errShort
	}
	r.data = r.data[n:]
	return u, nil
}

// flag reads a byte that says whether something follows.
func (r *reader) flag() (bool, error) {
	b, err := r.take(1)
	return err == nil && b[0] != 0, err
}

func (r *reader) value(v reflect.Value) error {
	switch v.Kind() {
	case reflect.Struct:
		for _, field := range fields(v) {
			if err := r.value(field); err != nil {
				return err
			}
		}
		return nil
	case reflect.Pointer:
		there, err := r.flag()
		if err != nil || !there {
			v.SetZero()
			return err
		}
		v.Set(reflect.New(v.Type().Elem()))
		return r.value(v.Elem())
	case reflect.Array:
		return r.elements(v)
	case reflect.Slice:
		return r.slice(v)
	case reflect.Map:
		return r.pairs(v)
	case reflect.Interface:
		return r.loose(v)
	}
	return r.scalar(v)
}

// loose reads what an any holds.
func (r *reader) loose(v reflect.Value) error {
	b, err := r.take(1)
	switch {
	case err != nil:
		return err
	case b[0] == 0:
		v.SetZero()
		return nil
	case int(b[0]) >= len(loose) || v.NumMethod() > 0:
		return fmt.Errorf("a %s cannot be received", v.Type())
	}
	of := reflect.New(loose[b[0]]).Elem()
	if err := r.value(of); err != nil {
		return err
	}
	v.Set(of)
	return nil
}

func (r *reader) scalar(v reflect.Value) error {
	switch v.Kind() {
	case reflect.Bool:
		set, err := r.flag()
		v.SetBool(set)
		return err
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		i, n := binary.Varint(r.data)
		if n <= 0 || v.OverflowInt(i) {
			return errShort
		}
		r.data = r.data[n:]
		v.SetInt(i)
		return nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		u, err := r.uvarint()
		if err != nil || v.OverflowUint(u) {
			return errShort
		}
		v.SetUint(u)
		return nil
	case reflect.Float32, reflect.Float64:
		b, err := r.take(8)
		if err != nil {
			return err
		}
		v.SetFloat(math.Float64frombits(binary.LittleEndian.Uint64(b)))
		return nil
	case reflect.String:
		n, err := r.uvarint()
		if err != nil {
			return err
		}
		b, err := r.take(n)
		v.SetString(string(b))
		return err
	}
	return fmt.Errorf("a %s cannot be received", v.Type())
}

// count reads a length, -1 for nil. Each element has a byte at least, or nothing is believed.
func (r *reader) count() (int, error) {
	u, err := r.uvarint()
	if err != nil || u > uint64(len(r.data))+1 {
		return 0, errShort
	}
	return int(u) - 1, nil
}

func (r *reader) slice(v reflect.Value) error {
	n, err := r.count()
	if err != nil || n < 0 {
		v.SetZero()
		return err
	}
	size := uint64(0) // of an element that stands as it is
	switch v.Interface().(type) {
	case []byte:
		b, err := r.take(uint64(n))
		v.SetBytes(bytes.Clone(b))
		return err
	case []int32, []float32:
		size = 4
	case []int64, []float64:
		size = 8
	}
	if size == 0 {
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		return r.elements(v)
	}
	b, err := r.take(uint64(n) * size)
	if err != nil {
		return err
	}
	v.Set(reflect.MakeSlice(v.Type(), n, n))
	_, err = binary.Decode(b, binary.LittleEndian, v.Interface())
	return err
}

func (r *reader) elements(v reflect.Value) error {
	for i := range v.Len() {
		if err := r.value(v.Index(i)); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) pairs(v reflect.Value) error {
	n, err := r.count()
	if err != nil || n < 0 {
		v.SetZero()
		return err
	}
	v.Set(reflect.MakeMapWithSize(v.Type(), n))
	for range n {
		key := reflect.New(v.Type().Key()).Elem()
		value := reflect.New(v.Type().Elem()).Elem()
		if err := r.value(key); err != nil {
			return err
		}
		if err := r.value(value); err != nil {
			return err
		}
		v.SetMapIndex(key, value)
	}
	return nil
}

package main
import ("testing")
func TestZZ(t *testing.T){
 s,err:=topSection(1); if err!=nil{t.Fatal(err)}
 t.Log(s.text)
}

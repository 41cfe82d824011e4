from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("code", "message", "where", "remedy")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    where: str
    remedy: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., where: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class DimensionAxes(_message.Message):
    __slots__ = ("axes",)
    AXES_FIELD_NUMBER: _ClassVar[int]
    axes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, axes: _Optional[_Iterable[str]] = ...) -> None: ...

class MeshAxis(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ArrayType(_message.Message):
    __slots__ = ("element_type", "dimensions")
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    element_type: str
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, element_type: _Optional[str] = ..., dimensions: _Optional[_Iterable[int]] = ...) -> None: ...

class ArrayLayout(_message.Message):
    __slots__ = ("type", "mesh", "dimensions", "stored_dimensions", "view_of", "first_device", "is_on_host")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    STORED_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    VIEW_OF_FIELD_NUMBER: _ClassVar[int]
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    IS_ON_HOST_FIELD_NUMBER: _ClassVar[int]
    type: ArrayType
    mesh: _containers.RepeatedCompositeFieldContainer[MeshAxis]
    dimensions: _containers.RepeatedCompositeFieldContainer[DimensionAxes]
    stored_dimensions: _containers.RepeatedScalarFieldContainer[int]
    view_of: _containers.RepeatedScalarFieldContainer[int]
    first_device: int
    is_on_host: bool
    def __init__(self, type: _Optional[_Union[ArrayType, _Mapping]] = ..., mesh: _Optional[_Iterable[_Union[MeshAxis, _Mapping]]] = ..., dimensions: _Optional[_Iterable[_Union[DimensionAxes, _Mapping]]] = ..., stored_dimensions: _Optional[_Iterable[int]] = ..., view_of: _Optional[_Iterable[int]] = ..., first_device: _Optional[int] = ..., is_on_host: _Optional[bool] = ...) -> None: ...
